"""The digest of a file that is being written, computed while its bytes go to the disk.

SHA-256 takes more time than writing, and neither needs the interpreter, so a thread digests what
the caller writes meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

__all__ = ["FileDigest"]

_SMALL = 256 << 10
"""Bytes up to which handing them to a thread takes longer than digesting them."""


class FileDigest:
    """SHA-256 of what it is given, in that order. Close it."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="digest")

    @contextlib.contextmanager
    def taking(self, data: memoryview) -> Iterator[None]:
        """Digest ``data`` while the block runs, and be done when it is left."""
        if data.nbytes <= _SMALL:
            self._digest.update(data)
            yield
            return
        work = self._thread.submit(self._digest.update, data)
        try:
            yield
        finally:
            work.result()

    def hexdigest(self) -> str:
        """Of all that was taken so far."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """End the thread, if there ever was one."""
        self._thread.shutdown(wait=True)
