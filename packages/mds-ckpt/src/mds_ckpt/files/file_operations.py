"""Every way in which this package changes the disk, behind one small class.

Tests put another in its place: one that fails, is killed, or forgets what was never forced to disk.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import BinaryIO

PARTIAL = ".partial-"
"""Between the name of what is being written and a random suffix."""
REPLACED = ".replaced-"
"""Between the name of what is being replaced and a random suffix."""


class FileOperations:
    """Every way in which this package changes the disk. Tests replace it."""

    def make_folder(self, path: Path) -> None:
        """Create one folder; its parent exists, itself does not."""
        path.mkdir()

    def create(self, path: Path) -> BinaryIO:
        """A new file for writing; refuses an existing one, also a dangling link."""
        return path.open("xb", buffering=0)

    def create_sized(self, path: Path, size: int) -> BinaryIO:
        """A new file that will hold ``size`` bytes, for those that must know it at once."""
        del size
        return self.create(path)

    def write(self, file: BinaryIO, data: memoryview) -> None:
        """Write all of ``data``, and see that all of it was taken."""
        done = 0
        with _naming(file):
            start = file.tell()
            while done < len(data):
                done += file.write(data[done : done + (64 << 20)]) or 0
            if file.tell() != start + len(data):
                raise OSError(errno.EIO, "The system took less than it said that it had written")

    def write_at(self, file: BinaryIO, data: memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``, from any thread; what is cut short is read again."""
        done = 0
        with _naming(file):
            while done < len(data):
                part = data[done : done + (64 << 20)]
                taken = _write_at(file, part, offset + done)
                if taken < len(part):
                    _check_taken(file, part[:taken], offset + done)
                done += taken

    def sync(self, file: BinaryIO) -> None:
        """Force a file's bytes to the disk."""
        with _naming(file):
            file.flush()
            os.fsync(file.fileno())

    def sync_path(self, path: Path) -> None:
        """Force the bytes of a file that was written and closed to the disk."""
        with path.open("r+b", buffering=0) as file:
            os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Force a folder's entries to the disk, where the system can (not on Windows)."""
        if os.name == "nt":  # pragma: no cover
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give a folder a name that nothing has."""
        if os.path.lexists(target):
            raise FileExistsError(f"{target} exists already")
        source.rename(target)

    def replace(self, source: Path, target: Path) -> None:
        """Put a file in the place of another."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Delete a file or a link."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Delete an empty folder."""
        path.rmdir()


if hasattr(os, "pwrite"):

    def _write_at(file: BinaryIO, data: memoryview, offset: int) -> int:
        return os.pwrite(file.fileno(), data, offset)

else:  # pragma: no cover - Windows
    _POSITION = Lock()
    """Held from the move to a place until what belongs there is written."""

    def _write_at(file: BinaryIO, data: memoryview, offset: int) -> int:
        with _POSITION:
            file.seek(offset)
            return file.write(data)


def _check_taken(file: BinaryIO, data: memoryview, offset: int) -> None:
    """A disk that takes a part only is in trouble: believe what it holds, not what it says."""
    with Path(file.name).open("rb", buffering=0) as written:
        written.seek(offset)
        if written.read(len(data)) != data:
            raise OSError(errno.EIO, "The system took less than it said that it had written")


@contextmanager
def _naming(file: BinaryIO) -> Iterator[None]:
    """Let an error tell the file's name: the system says only what is wrong."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = file.name
        raise


REAL = FileOperations()


def partial_path(target: Path, *, kind: str = PARTIAL) -> Path:
    """A fresh name beside ``target`` for writing what will become it."""
    return target.with_name(f"{target.name}{kind}{os.urandom(4).hex()}")


def write_file(path: Path, data: bytes, *, operations: FileOperations = REAL) -> None:
    """Write a new file and force it to the disk."""
    with operations.create_sized(path, len(data)) as file:
        operations.write(file, memoryview(data))
        operations.sync(file)


def replace_file(path: Path, data: bytes, *, operations: FileOperations = REAL) -> None:
    """Give a file new content that is there whole, also after a power loss, or not at all."""
    temporary = partial_path(path)
    try:
        write_file(temporary, data, operations=operations)
        operations.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    operations.sync_folder(path.parent)


def make_folders(path: Path, *, operations: FileOperations = REAL) -> None:
    """Create a folder and those above it that are missing, and force their names to the disk."""
    if path.is_dir():
        return
    make_folders(path.parent, operations=operations)
    try:
        operations.make_folder(path)
    except FileExistsError:
        if not path.is_dir():  # else another process was quicker
            raise
    operations.sync_folder(path.parent)


def remove_tree(path: Path, *, operations: FileOperations = REAL) -> None:
    """Delete a folder and what it holds; links are deleted, never followed."""
    for entry in sorted(path.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            remove_tree(entry, operations=operations)
        else:
            operations.remove(entry)
    operations.remove_folder(path)
