"""The right to write into a folder, held by one process at a time."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mds_ckpt.errors import LockedError, RejectedError

LOCK_NAME = ".mds-lock"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock."""

    pid: int
    host: str
    since: str


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the only right to write into ``folder``; LockedError says who has it.

    The system drops the lock when its holder dies, so a dead holder never blocks anyone.
    """
    path = folder / LOCK_NAME
    if path.is_symlink():
        raise RejectedError(path, "it is a link", remedy="remove it, locks are plain files")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not _try_lock(descriptor):
            raise LockedError(f"{folder} is being written by another process{_holder(descriptor)}")
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0) if hasattr(os, "pwrite") else os.write(
            descriptor, text.encode()
        )
        yield
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    with suppress(ValueError, KeyError, OSError, TypeError):
        os.lseek(descriptor, 0, os.SEEK_SET)
        holder = Holder(**json.loads(os.read(descriptor, 1000)))
        return f" ({holder.pid} on {holder.host}, since {holder.since})"
    return ""


if os.name == "nt":  # pragma: no cover
    import msvcrt

    def _try_lock(descriptor: int) -> bool:
        os.lseek(descriptor, 1 << 20, os.SEEK_SET)  # beyond the text, so that others can read it
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        except OSError:
            return False
        os.lseek(descriptor, 0, os.SEEK_SET)
        return True

else:
    import fcntl

    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
