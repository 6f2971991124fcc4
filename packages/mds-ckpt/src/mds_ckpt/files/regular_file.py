"""Open files of an untrusted folder for reading: plain names, regular files, no links to elsewhere.

Bytes are read with ``pread`` rather than mapped: a mapped file that shrinks kills the process, and
mapped pages count as its memory. Every open checks that the file is still the one seen first, so
what was verified is what is read.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mds_ckpt.errors import RejectedError

_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_BINARY", 0)
)
_LINKS = "a checkpoint's files must lie in its own folder"


def name_fault(name: str) -> str | None:
    """Why ``name`` is not the plain name of a file in one folder; None if it is."""
    if not name or name in {".", ".."}:
        return "is empty or a folder"
    if "/" in name or "\\" in name:
        return "holds a path separator"
    if "\0" in name or name[1:2] == ":":
        return "is not a portable file name"
    if len(os.fsencode(name) if name.isprintable() else name) > 255:
        return "is longer than 255 bytes"
    return None


class OpenFile:
    """An open descriptor with its size; reads at any offset, from any thread."""

    def __init__(self, descriptor: int, path: Path, size: int) -> None:
        self.descriptor = descriptor
        self.path = path
        self.size = size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` (bytes) with the file's bytes from ``offset`` on."""
        done = 0
        while done < len(buffer):
            count = _read_at(self.descriptor, buffer[done:], offset + done)
            if count == 0:
                raise RejectedError(
                    self.path,
                    f"it ends at byte {offset + done} while it was being read",
                    remedy="copy the checkpoint again, it is truncated",
                )
            done += count

    def read(self, offset: int, count: int) -> bytearray:
        """``count`` bytes from ``offset`` on."""
        data = bytearray(count)
        self.read_into(memoryview(data), offset)
        return data


class FrontToBack:
    """An open file read from its first byte on."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self._position = 0

    def read(self, count: int) -> bytearray:
        """The next ``count`` bytes."""
        data = self._file.read(self._position, count)
        self._position += count
        return data


if hasattr(os, "preadv"):

    def _read_at(descriptor: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [buffer], offset)

else:  # pragma: no cover - Windows

    def _read_at(descriptor: int, buffer: memoryview, offset: int) -> int:
        os.lseek(descriptor, offset, os.SEEK_SET)
        data = os.read(descriptor, min(len(buffer), 1 << 24))
        buffer[: len(data)] = data
        return len(data)


class RegularFile:
    """A regular file that is opened again for each use, and refused once it has changed.

    Args:
        path: The file.
        cache_links: Follow the links of a Hugging Face cache (``snapshots/*`` to its ``blobs/``)
            and links that stay inside the file's own folder.
    """

    def __init__(self, path: Path, *, cache_links: bool = False) -> None:
        self.path = path
        self._cache_links = cache_links
        self._identity: tuple[int, ...] | None = None

    @contextmanager
    def open(self) -> Iterator[OpenFile]:
        """The open file, closed again at the end.

        Raises:
            RejectedError: For a missing file, a link, a device, a FIFO, or a file that changed.
        """
        descriptor = _open_descriptor(self.path, cache_links=self._cache_links)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise RejectedError(self.path, "it is not a regular file", remedy=_LINKS)
            self._check_identity(found)
            yield OpenFile(descriptor, self.path, found.st_size)
        finally:
            os.close(descriptor)

    def _check_identity(self, found: os.stat_result) -> None:
        identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        if self._identity is None:
            self._identity = identity
        elif self._identity != identity:
            raise RejectedError(
                self.path,
                "it changed while it was being read",
                remedy="stop whatever writes into the folder and try again",
            )


def read_whole(path: Path, *, limit: int, cache_links: bool = False) -> bytes:
    """All bytes of a small file; RejectedError if it is larger than ``limit``."""
    with RegularFile(path, cache_links=cache_links).open() as file:
        if file.size > limit:
            raise RejectedError(
                path,
                f"it has {file.size} bytes and at most {limit} are read",
                remedy="this is not the file that its name promises",
            )
        return bytes(file.read(0, file.size))


def _open_descriptor(path: Path, *, cache_links: bool) -> int:
    target = path
    if path.is_symlink():
        target = _link_target(path, cache_links=cache_links)
    try:
        return os.open(target, _FLAGS)
    except FileNotFoundError:
        raise RejectedError(
            path, "there is no such file", remedy="check the path, or copy the file that is missing"
        ) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise RejectedError(path, "it is a link", remedy=_LINKS) from None
        if error.errno in {errno.ENXIO, errno.ENODEV, errno.EISDIR}:
            raise RejectedError(path, "it is not a regular file", remedy=_LINKS) from None
        raise


def _link_target(path: Path, *, cache_links: bool) -> Path:
    """Where an allowed link leads; RejectedError for all others."""
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):
        raise RejectedError(path, "it is a link that leads nowhere", remedy=_LINKS) from None
    folder = path.parent.resolve()
    if cache_links and (target.parent == folder or target.parent == _blobs(folder)):
        return target
    raise RejectedError(path, "it is a link to another place", remedy=_LINKS)


def _blobs(folder: Path) -> Path | None:
    """The blobs folder of the Hugging Face cache that ``folder`` is a snapshot of."""
    if folder.parent.name != "snapshots":
        return None
    return folder.parent.parent / "blobs"
