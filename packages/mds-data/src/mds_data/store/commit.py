"""Commit a store so that a killed writer leaves the old or the new state, never a mixture.

A new store grows in a sibling folder ``NAME.partial-RANDOM`` and is renamed when it is whole. A
changed store gets its new files as ``FILE.rREVISION`` beside the old ones; replacing the manifest
is the commit, and `settle` moves the new files over the old ones afterwards, also for one that
died in between. Every file operation goes through one `FileOperations` object, so that tests can
stop the process at each of them.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from mds_data.errors import StoreError
from mds_data.store.schema import MANIFEST_NAME, FileRecord, Manifest, manifest_to_json

__all__ = [
    "RESUME_NAME",
    "FileOperations",
    "OutputFile",
    "PartialFolder",
    "check_free_name",
    "leftover_files",
    "make_folders",
    "partial_folders",
    "pending_name",
    "put_file",
    "replace_manifest",
    "settle",
    "sweep",
]

RESUME_NAME = "resume.json"
"""In a partial folder: what the next writer needs to go on."""
_PARTIAL = ".partial-"
_ARRAY_FILE = re.compile(r"[^.]+/(c/[0-9]+|zarr\.json)")
"""Files of arrays; a file of someone else that happens to end like ours is left alone."""


class FileOperations:
    """The few file operations that a writer needs, one method each."""

    def create(self, path: Path) -> int:
        """Open a new file for reading and writing; it must not exist."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        return os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o666)

    def write(self, handle: int, data: memoryview) -> None:
        """Write all of ``data``."""
        while data:
            data = data[os.write(handle, data) :]

    def reopen(self, path: Path, size: int) -> int:
        """Open a file that was begun, cut it to ``size`` bytes, and go on at its end."""
        flags = os.O_RDWR | getattr(os, "O_BINARY", 0)
        handle = os.open(path, flags | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0))
        os.ftruncate(handle, size)
        os.lseek(handle, size, os.SEEK_SET)
        return handle

    def sync(self, handle: int) -> None:
        """Bring the file's bytes to the disk."""
        os.fsync(handle)

    def sync_folder(self, path: Path) -> None:
        """Bring the folder's names to the disk, where the system can."""
        if sys.platform == "win32":
            return
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def make_folder(self, path: Path) -> None:
        """Make one folder."""
        path.mkdir()

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file over another one, or a folder to a free name."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove one file."""
        path.unlink()

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name; copy it where the file system has no hard links."""
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)
            handle = os.open(target, os.O_RDWR | getattr(os, "O_BINARY", 0))
            try:
                self.sync(handle)
            finally:
                os.close(handle)

    def overwrite(self, path: Path) -> None:
        """Put zeros over every byte of a file, in place."""
        handle = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
        try:
            left = os.fstat(handle).st_size
            zeros = memoryview(bytes(min(left, 2**20)))
            while left:
                left -= os.write(handle, zeros[:left])
            self.sync(handle)
        finally:
            os.close(handle)


def make_folders(path: Path, *, operations: FileOperations) -> None:
    """Make a folder and those above it that are missing, and bring their names to the disk."""
    if path.is_dir():
        return
    make_folders(path.parent, operations=operations)
    try:
        operations.make_folder(path)
    except FileExistsError:
        if not path.is_dir():  # else another process was quicker
            raise
    operations.sync_folder(path.parent)


class OutputFile:
    """A file that is written once, front to back, with its size and SHA-256 counted on the way."""

    def __init__(self, path: Path, *, operations: FileOperations) -> None:
        self._operations = operations
        self._handle = operations.create(path)
        self._digest = hashlib.sha256()
        self.size = 0

    @classmethod
    def resumed(cls, path: Path, *, size: int, operations: FileOperations) -> "OutputFile":
        """Go on with a file of which the first ``size`` bytes are right.

        Raises:
            StoreError: It is shorter.
        """
        output = cls.__new__(cls)
        output._operations = operations
        output._digest = hashlib.sha256()
        output.size = size
        with path.open("rb") as file:
            left = size
            while block := file.read(min(left, 2**20)):
                output._digest.update(block)
                left -= len(block)
        if left:
            raise StoreError(f"{path}: was cut since the interrupted run wrote it; start anew")
        output._handle = operations.reopen(path, size)
        return output

    def sync(self) -> None:
        """Bring what was written so far to the disk."""
        self._operations.sync(self._handle)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes."""
        view = memoryview(data).cast("B")
        self._operations.write(self._handle, view)
        self._digest.update(view)
        self.size += len(view)

    def close(self) -> FileRecord:
        """Bring the file to the disk, see that all of it is there, and close it."""
        try:
            self._operations.sync(self._handle)
            if os.fstat(self._handle).st_size != self.size:
                raise OSError(errno.EIO, "The system took less than it said that it had written")
        finally:
            self.abandon()
        return FileRecord(size=self.size, sha256=self._digest.hexdigest())

    def abandon(self) -> None:
        """Close the file as it is; it will not become part of a store."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def put_file(path: Path, data: bytes, *, operations: FileOperations) -> FileRecord:
    """Write a whole new file and bring it to the disk."""
    output = OutputFile(path, operations=operations)
    try:
        output.write(data)
    except BaseException:
        output.abandon()
        raise
    return output.close()


def check_free_name(target: Path) -> None:
    """Refuse a name for a new store that is taken, or that lies inside another store.

    Raises:
        StoreError: It is so.
    """
    if os.path.lexists(target):
        raise StoreError(f"{target}: exists; choose another name or remove it first")
    for above in target.absolute().parents:
        if (above / MANIFEST_NAME).is_file() and (above / "zarr.json").is_file():
            raise StoreError(f"{target}: lies inside the store {above}; name a folder beside it")


class PartialFolder:
    """The sibling folder in which a new store grows until `publish` gives it its name."""

    def __init__(
        self, target: Path, *, operations: FileOperations, path: Path | None = None
    ) -> None:
        """Make a new folder, or go on in ``path``, which a killed writer left."""
        self.target = target
        self.operations = operations
        self.path = path or target.with_name(f"{target.name}{_PARTIAL}{secrets.token_hex(8)}")
        if path is None:
            operations.make_folder(self.path)

    def file(self, relative: str) -> Path:
        """The path for a new file of the store; the folders above it are made."""
        folder = self.path
        *above, name = relative.split("/")
        for part in above:
            folder = folder / part
            if not folder.is_dir():
                self.operations.make_folder(folder)
        return folder / name

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest, make all names durable, and rename the folder to its name."""
        self.sync_folders()
        put_file(self.path / MANIFEST_NAME, manifest_to_json(manifest), operations=self.operations)
        self.operations.sync_folder(self.path)
        if (self.path / RESUME_NAME).exists():
            self.operations.remove(self.path / RESUME_NAME)  # from here on the manifest counts
            self.operations.sync_folder(self.path)
        self.give_name()

    def sync_folders(self) -> None:
        """Bring the names of all files below to the disk."""
        for folder in _folders_below(self.path):
            self.operations.sync_folder(folder)

    def give_name(self) -> None:
        """Rename the folder, which is whole, to its name."""
        if os.path.lexists(self.target):
            raise StoreError(
                f"{self.target}: appeared while the store was written; choose another name"
            )
        self.operations.rename(self.path, self.target)
        self.operations.sync_folder(self.target.parent)

    def discard(self) -> None:
        """Remove the folder; errors while cleaning up are left to `sweep`."""
        shutil.rmtree(self.path, ignore_errors=True)


def _folders_below(path: Path) -> Iterator[Path]:
    for child in sorted(path.iterdir()):
        if child.is_dir() and not child.is_symlink():
            yield from _folders_below(child)
            yield child


def sweep(target: Path) -> None:
    """Remove what killed writers of ``target`` left; the caller holds the store's lock."""
    for folder in partial_folders(target):
        shutil.rmtree(folder, ignore_errors=True)


def partial_folders(target: Path) -> list[Path]:
    """Folders in which writers of ``target`` were or are at work."""
    prefix = f"{target.name}{_PARTIAL}"
    siblings = target.parent.iterdir() if target.parent.is_dir() else ()
    return sorted(
        each
        for each in siblings
        if each.name.startswith(prefix) and each.is_dir() and not each.is_symlink()
    )


def pending_name(path: str, *, revision: int) -> str:
    """Name under which revision ``revision`` of a file waits for its commit."""
    return f"{path}.r{revision}"


def replace_manifest(root: Path, manifest: Manifest, *, operations: FileOperations) -> None:
    """Commit a changed store: all its pending files become valid at the moment of one rename."""
    waiting = root / pending_name(MANIFEST_NAME, revision=manifest.revision)
    if os.path.lexists(waiting):
        operations.remove(waiting)
    put_file(waiting, manifest_to_json(manifest), operations=operations)
    for folder in [*_folders_below(root), root]:
        operations.sync_folder(folder)
    operations.rename(waiting, root / MANIFEST_NAME)
    operations.sync_folder(root)


def leftover_files(present: Iterable[str], manifest: Manifest) -> Iterator[tuple[str, str | None]]:
    """Files with names that wait for a commit, each with its own name if it was committed.

    Args:
        present: Every file of the store, relative paths with ``/``.
        manifest: The manifest that is in force.
    """
    for relative in sorted(present):
        base, dot, revision = relative.rpartition(".r")
        if not dot or not revision.isdecimal():
            continue
        if base in manifest.files and int(revision) == manifest.revision:
            yield relative, base
        elif base in manifest.files or base == MANIFEST_NAME or _ARRAY_FILE.fullmatch(base):
            yield relative, None


def settle(
    root: Path, manifest: Manifest, *, operations: FileOperations, present: Iterable[str]
) -> None:
    """Move the manifest's pending files to their names; remove those that were never committed.

    Args:
        root: The store's folder; the caller holds its lock.
        manifest: The manifest that is in force.
        operations: Where file operations go.
        present: Every file in the folder, relative paths with ``/``.
    """
    scrub = any(erasure.revision == manifest.revision for erasure in manifest.erasures)
    folders = set()
    for relative, own_name in leftover_files(present, manifest):
        if own_name is None:
            operations.remove(root / relative)
            continue
        final = root / own_name
        if scrub and final.exists() and final.stat().st_nlink == 1:
            operations.overwrite(final)  # what was erased must not stay on the disk
        operations.rename(root / relative, final)
        folders.add(final.parent)
    for folder in sorted(folders):
        operations.sync_folder(folder)
