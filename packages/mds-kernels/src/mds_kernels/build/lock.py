"""A lock that knows its owner: two builds never write one library, and a dead one holds nobody up.

The operating system drops it when its owner ends, however that ends, so it can't be left behind;
what stands in the file only says whom the others wait for.
"""

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Owner", "build_lock", "owner_of"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Owner:
    """Who builds."""

    pid: int
    host: str
    since: float
    """Seconds of the epoch."""

    def __str__(self) -> str:
        """Say it in words."""
        return f"process {self.pid} on {self.host}, for {time.time() - self.since:.0f} s"


@contextlib.contextmanager
def build_lock(path: Path) -> Iterator[None]:
    """Hold the lock at ``path``; whoever else wants it waits, and says for whom."""
    import fcntl  # not on Windows, where nothing is built

    path.parent.mkdir(parents=True, exist_ok=True)
    with _acquired(path, fcntl.flock, fcntl.LOCK_EX, fcntl.LOCK_NB) as file:
        os.ftruncate(file, 0)
        os.write(file, json.dumps(asdict(_myself())).encode())
        try:
            yield
        finally:
            # Only while it is held: so nobody can hold a file that another has just replaced.
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _acquired(path: Path, flock: object, exclusive: int, at_once: int) -> Iterator[int]:
    assert callable(flock)
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                flock(file, exclusive | at_once)
            except BlockingIOError:
                logger.warning("waiting for the build of %s", owner_of(path) or "another process")
                flock(file, exclusive)
            if _is_still(path, file):
                yield file
                return
        finally:
            os.close(file)


def owner_of(path: Path) -> Owner | None:
    """Return who wrote the lock file last, or None if there is none."""
    try:
        return Owner(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # gone, or not written yet
        return None


def _myself() -> Owner:
    return Owner(os.getpid(), socket.gethostname(), time.time())


def _is_still(path: Path, file: int) -> bool:
    """Tell whether the open file is the one at ``path``; the former owner removes it."""
    try:
        return path.stat().st_ino == os.fstat(file).st_ino
    except FileNotFoundError:
        return False
