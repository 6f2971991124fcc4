"""A file that lies encrypted in a folder, read like a regular one: only the parts asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mds_ckpt.encryption.segments import FileKey, SealedFile
from mds_ckpt.errors import RejectedError
from mds_ckpt.files.regular_file import OpenFile, RegularFile

__all__ = ["SealedRegularFile"]


class _OpenSealed(OpenFile):
    """An open file whose bytes are opened as they are read."""

    def __init__(self, stored: OpenFile, path: Path, sealed: SealedFile) -> None:
        super().__init__(stored.descriptor, path, sealed.size)
        self._sealed = sealed

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` with the plain bytes from ``offset`` on."""
        buffer[:] = memoryview(self._sealed.read(offset, offset + len(buffer)))


class SealedRegularFile(RegularFile):
    """A sealed file of a folder.

    Args:
        path: Where its plain form would lie; for messages.
        stored: The sealed file.
        key: What it must be bound to.
        size: Bytes of its plain form.
    """

    def __init__(self, path: Path, *, stored: Path, key: FileKey, size: int) -> None:
        super().__init__(stored)
        self._plain = path
        self._key = key
        self._size = size

    @contextmanager
    def open(self) -> Iterator[OpenFile]:
        """The open file; what was changed in it is refused where it is read."""
        with super().open() as stored:
            sealed = SealedFile(
                stored.read, stored.size, key=self._key, name=f"{self.path} ({self._plain.name})"
            )
            if sealed.size != self._size:
                raise RejectedError(
                    self.path,
                    f"it holds {sealed.size} bytes where the manifest says {self._size}",
                    remedy="restore the file from a copy",
                )
            yield _OpenSealed(stored, self._plain, sealed)
