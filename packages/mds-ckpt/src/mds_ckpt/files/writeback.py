"""Let the disk begin with what was written while the rest is still being made.

The system gathers written pages, and forcing a file at its end waits for all of them. A hint for
each stretch that is complete lets it write them meanwhile. It changes no content, so it is no
operation of the disk that could fail or be lost.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import BinaryIO

__all__ = ["Writeback"]

_STRETCH = 8 << 20
_SMALL = 256 << 10
"""Bytes from which what is left at the end is worth a hint."""


class Writeback:
    """The hints for consecutive bytes of a file.

    Args:
        file: Open for writing; anything without a descriptor gets no hints.
        start: Where in the file the bytes begin.
    """

    def __init__(self, file: BinaryIO, *, start: int = 0) -> None:
        self._descriptor: int | None = None
        if hasattr(os, "posix_fadvise"):
            with suppress(AttributeError, OSError):
                self._descriptor = file.fileno()
        self._begun = self._written = start

    def wrote(self, nbytes: int) -> None:
        """So many bytes more are written."""
        self._written += nbytes
        self._begin(_STRETCH)

    def complete(self) -> None:
        """All is written; worth it where it is forced to the disk after others only."""
        self._begin(_SMALL)

    def _begin(self, least: int) -> None:
        stretch = self._written - self._begun
        if self._descriptor is None or stretch < least:
            return
        # Linux begins to write the dirty pages of a range that is said not to be needed again. A
        # file system that does not know the hint is none the worse for it.
        with suppress(OSError):
            os.posix_fadvise(self._descriptor, self._begun, stretch, os.POSIX_FADV_DONTNEED)
        self._begun = self._written
