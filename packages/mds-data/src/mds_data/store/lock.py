"""One writer at a time: the lock file ``NAME.lock`` beside a store, with pid, host and since.

Where the system has flock, the kernel frees a dead writer's lock; elsewhere the pid tells.
"""

import json
import os
import socket
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mds_data.errors import LockedError

if sys.platform != "win32":
    import fcntl

__all__ = ["StoreLock"]


class StoreLock:
    """Hold the writer's lock of one store while in the ``with`` block.

    Raises:
        LockedError: A living writer holds it; the message says which.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._path = store.with_name(store.name + ".lock")
        self._handle = -1

    def __enter__(self) -> Self:
        for _ in range(100):
            if self._try():
                return self
        raise LockedError(f"{self._path}: other writers keep taking the lock; try again later")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if sys.platform == "win32":  # an open file has to be closed before it can go
            os.close(self._handle)
            self._path.unlink(missing_ok=True)
        else:
            self._path.unlink(missing_ok=True)
            os.close(self._handle)
        self._handle = -1

    def _try(self) -> bool:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
        handle = os.open(self._path, flags, 0o666)
        try:
            holder = self._holder(handle)
            if not _take(handle) or _alive_elsewhere(holder):
                raise LockedError(self._message(holder))
            if not self._still_named(handle):
                os.close(handle)
                return False
            self._sign(handle)
        except BaseException:
            with suppress(OSError):
                os.close(handle)
            raise
        self._handle = handle
        return True

    def _still_named(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), self._path.stat())
        except FileNotFoundError:
            return False

    @staticmethod
    def _holder(handle: int) -> dict[str, Any]:
        os.lseek(handle, 0, os.SEEK_SET)
        try:
            value = json.loads(os.read(handle, 4096) or b"{}")
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    @staticmethod
    def _sign(handle: int) -> None:
        since = datetime.now(UTC).isoformat(timespec="seconds")
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        os.ftruncate(handle, 0)
        os.lseek(handle, 0, os.SEEK_SET)
        os.write(handle, json.dumps(owner).encode())

    def _message(self, holder: dict[str, Any]) -> str:
        pid, host, since = (holder.get(key, "unknown") for key in ("pid", "host", "since"))
        return (
            f"{self._store}: another writer holds it (process {pid} on {host} since {since}); "
            f"wait for it, or remove {self._path} if that process is gone"
        )


def _take(handle: int) -> bool:
    """Lock the open file if nobody else does; always true where there is no flock."""
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without flock: the pid has to do
        return True
    return True


def _alive_elsewhere(holder: dict[str, Any]) -> bool:
    """Whether the owner may live although flock let us in: another host, or no flock here."""
    pid, host = holder.get("pid"), holder.get("host")
    if type(pid) is not int or not isinstance(host, str):
        return False
    if host != socket.gethostname():
        return True
    return sys.platform == "win32" and pid != os.getpid() and _windows_process_lives(pid)


def _windows_process_lives(pid: int) -> bool:
    import ctypes

    windll: Any = vars(ctypes)["windll"]  # absent elsewhere
    process = windll.kernel32.OpenProcess(0x1000, 0, pid)
    if not process:
        return False
    code = ctypes.c_ulong()
    windll.kernel32.GetExitCodeProcess(process, ctypes.byref(code))
    windll.kernel32.CloseHandle(process)
    return code.value == 259
