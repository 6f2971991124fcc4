"""Safe access to the files of one store folder: one scan, plain files only, nothing outside it."""

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from mds_data.errors import DamagedError, StoreError
from mds_data.store.commit import pending_name
from mds_data.store.schema import (
    MANIFEST_LIMIT,
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    manifest_from_json,
)

__all__ = [
    "FileList",
    "StoreFolder",
    "file_problems",
    "is_store",
    "open_plain_file",
    "read_manifest",
    "read_manifest_bytes",
    "read_plain_file",
]

_OPEN_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NONBLOCK", 0)  # a FIFO must not hang us
    | getattr(os, "O_BINARY", 0)
)


_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


class FileList(Protocol):
    """What names the files of a folder."""

    @property
    def files(self) -> Mapping[str, FileRecord]:
        """Size and digest of each, by its path."""
        ...

    @property
    def revision(self) -> int:
        """Of the folder: new files of it may wait for their rename."""
        ...


def is_store(path: Path) -> bool:
    """Whether ``path`` is a folder with a manifest."""
    return (path / MANIFEST_NAME).is_file()


def open_plain_file(path: Path, *, follow_links: bool = False) -> tuple[int, int]:
    """Open a plain file for reading; its handle and size. A link is refused unless asked for.

    Raises:
        DamagedError: It is missing, a link, a folder or a device.
    """
    try:
        handle = os.open(path, _OPEN_FLAGS | (0 if follow_links else _NO_LINKS))
    except FileNotFoundError:
        raise DamagedError(f"{path}: is missing; restore it from a copy") from None
    except OSError as error:
        if path.is_symlink():
            raise DamagedError(f"{path}: is a link; a store holds plain files only") from None
        raise StoreError(f"{path}: can't be opened ({error.strerror})") from error
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise DamagedError(f"{path}: is not a plain file; a store holds plain files only")
    return handle, status.st_size


def read_plain_file(path: Path, *, limit: int) -> bytes:
    """The bytes of a plain file of at most ``limit`` bytes."""
    handle, size = open_plain_file(path)
    with os.fdopen(handle, "rb") as file:
        if size > limit:
            raise DamagedError(f"{path}: has {size} bytes; at most {limit} are expected here")
        return file.read(limit + 1)[: limit + 1]


def read_manifest(root: Path) -> tuple[Manifest, bytes]:
    """The manifest of the store at ``root``, and its bytes."""
    data = read_manifest_bytes(root)
    return manifest_from_json(data, name=str(root / MANIFEST_NAME)), data


def read_manifest_bytes(root: Path) -> bytes:
    """The bytes of the manifest of the store at ``root``, or of the envelope of a sealed one."""
    path = root / MANIFEST_NAME
    if not os.path.lexists(path):
        if not os.path.lexists(root):
            raise FileNotFoundError(f"{root}: there is no such store; check the path")
        raise StoreError(
            f"{root}: holds no {MANIFEST_NAME}, so it is no store or was never finished; "
            f"write it anew, or give the path of a store"
        )
    return read_plain_file(path, limit=MANIFEST_LIMIT)


class StoreFolder:
    """The files that one manifest names, checked once against the folder.

    Raises:
        DamagedError: A named file is missing, has another size, or is not a plain file.
    """

    def __init__(self, root: Path, manifest: FileList) -> None:
        self.root = root
        self.manifest = manifest
        self.present, self._pending, problems = _survey(root, manifest)
        if problems:
            raise DamagedError(next(iter(problems.values())))

    def path(self, relative: str) -> Path:
        """Where the bytes of a file that the manifest names are now."""
        if relative not in self.manifest.files:
            raise DamagedError(f"{self.root / relative}: the manifest does not list this file")
        if relative in self._pending:
            waiting = self.root / pending_name(relative, revision=self.manifest.revision)
            if waiting.exists():
                return waiting
        return self.root / relative

    def open(self, relative: str) -> tuple[int, int]:
        """Open a named file; its handle and size, which must still be the manifest's."""
        path = self.path(relative)
        try:
            handle, size = open_plain_file(path)
        except DamagedError:
            if relative not in self._pending:
                raise
            path = self.root / relative  # a writer has just moved it to its name
            handle, size = open_plain_file(path)
        if size != self.manifest.files[relative].size:
            os.close(handle)
            raise DamagedError(
                f"{path}: changed its size since the store was opened; open it again"
            )
        return handle, size

    def read(self, relative: str) -> bytes:
        """All bytes of a named file."""
        handle, size = self.open(relative)
        with os.fdopen(handle, "rb") as file:
            return file.read(size)


def file_problems(root: Path, manifest: FileList) -> dict[str, str]:
    """What is wrong with the presence, kind and size of each file that a manifest names."""
    return _survey(root, manifest)[2]


def _survey(
    root: Path, manifest: FileList
) -> tuple[dict[str, int], frozenset[str], dict[str, str]]:
    """Size of every plain file present, the named ones that wait for a rename, and problems."""
    folders = {path.rpartition("/")[0] for path in manifest.files}
    folders |= {folder[:end] for folder in folders for end in _positions(folder, "/")} | {""}
    sizes: dict[str, int] = {}
    odd: dict[str, str] = {}
    for folder in sorted(folders):
        if not any(folder == link or folder.startswith(f"{link}/") for link in odd):
            _scan_folder(root, folder, sizes, odd)
    suffix = pending_name("", revision=manifest.revision)
    waiting = {name.removesuffix(suffix) for name in sizes if name.endswith(suffix)}
    pending = frozenset(waiting & manifest.files.keys())
    problems = {}
    for path, record in manifest.files.items():
        size = sizes.get(path + suffix) if path in pending else sizes.get(path)
        if size != record.size or odd:
            reason = _problem(path, record, size=size, odd=odd)
            if reason:
                problems[path] = f"{root / path}: {reason}"
    return sizes, pending, problems


def _problem(path: str, record: FileRecord, *, size: int | None, odd: dict[str, str]) -> str | None:
    for end in [*_positions(path, "/"), len(path)] if odd else []:
        if path[:end] in odd:
            return odd[path[:end]]
    if size is None:
        return "is missing, and the manifest lists it; restore it from a copy"
    if size != record.size:
        return (
            f"has {size} bytes, and the manifest says {record.size}; "
            f"it was cut or replaced, restore it from a copy"
        )
    return None


def _positions(text: str, letter: str) -> list[int]:
    return [index for index, found in enumerate(text) if found == letter]


def _scan_folder(root: Path, folder: str, sizes: dict[str, int], odd: dict[str, str]) -> None:
    prefix = f"{folder}/" if folder else ""
    try:
        entries = list(os.scandir(root / folder))
    except (FileNotFoundError, NotADirectoryError):
        return  # the files in it count as missing
    for entry in entries:
        relative = prefix + entry.name
        if entry.is_symlink():
            odd[relative] = "is a link or lies behind one; a store holds plain files only"
        elif entry.is_file(follow_symlinks=False):
            with suppress(FileNotFoundError):  # a writer may be moving it to its name
                sizes[relative] = entry.stat(follow_symlinks=False).st_size
        elif not entry.is_dir(follow_symlinks=False):
            odd[relative] = "is not a plain file; a store holds plain files only"
