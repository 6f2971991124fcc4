"""SHA-256 of what passes by, computed in a thread of its own: it takes longer than the cipher."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from .segments import Buffer

__all__ = ["PassingDigest", "passing_digest"]


class PassingDigest:
    """The digest of all that was given so far. What is given may not be changed afterwards."""

    def __init__(self, worker: ThreadPoolExecutor) -> None:
        self._worker = worker
        self._digest = hashlib.sha256()
        self._running: Future[None] | None = None

    def update(self, data: Buffer) -> None:
        """Go on with ``data``; waits for what was given before, so that little is in memory."""
        self._wait()
        self._running = self._worker.submit(self._digest.update, data)

    def hexdigest(self) -> str:
        """The digest as hex digits."""
        self._wait()
        return self._digest.hexdigest()

    def _wait(self) -> None:
        if self._running is not None:
            self._running.result()
            self._running = None


@contextmanager
def passing_digest() -> Iterator[PassingDigest]:
    """A digest whose thread ends with the ``with`` block."""
    with ThreadPoolExecutor(1, thread_name_prefix="digest") as worker:
        yield PassingDigest(worker)
