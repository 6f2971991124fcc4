"""Files of a store that lies behind a network: read and written, with retries and a time limit.

Everything goes through zarr's store interface, so what zarr can reach will do: fsspec's file
systems, obstore's object stores, zip files, memory.
"""

import asyncio
import errno
import importlib
import os
import random
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from mds_data.errors import DamagedError

__all__ = ["RemoteError", "RemoteFiles", "RetryPolicy", "zarr_store"]

Answer = TypeVar("Answer")

_TRANSIENT = {
    "aiohttp": "ClientError",
    "botocore.exceptions": "BotoCoreError",
    "obstore.exceptions": "BaseError",
}
"""Errors of libraries that don't derive from OSError, by the module that must be loaded."""
_FINAL = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_DENIED = ("PermissionDeniedError", "UnauthenticatedError")
"""Errors of obstore that no further try mends."""
_SLOWEST = 2**19
"""Bytes a second that a network must carry, so that a try with much to send gets more time."""


class RemoteError(OSError):
    """A file behind the network could not be read or written, after all tries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How often, how long apart and how patiently a read or a write is tried."""

    attempts: int = 5
    first_wait: float = 0.2
    """Seconds before the second try; twice as long before each further one, and some chance."""
    timeout: float = 60.0
    """Seconds after which a try counts as failed; a write has longer by its size."""

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_wait < 0 or self.timeout <= 0:
            raise ValueError("retries need at least one attempt and some time")


class RemoteFiles:
    """Reads and writes files below one place; each may run beside others.

    Args:
        open_place: Makes zarr's store; called in each process that reads.
        name: How messages call the place.
        retries: How a read or a write is tried again.
    """

    def __init__(
        self, open_place: Callable[[], Any], *, name: str, retries: RetryPolicy | None = None
    ) -> None:
        self.name = name
        self._open_place = open_place
        self._retries = retries or RetryPolicy()
        self._process = -1
        self._lock = threading.Lock()

    def start(
        self, path: str, start: int, length: int, *, otherwise: str | None = None
    ) -> "Future[bytes]":
        """Begin to read ``length`` bytes of a file, or of another one if there is no such file."""
        return self._begin(self._range([path, otherwise or path], start, length))

    def read(self, path: str, *, otherwise: str | None = None) -> bytes:
        """All bytes of a file, or of another one if there is no such file.

        Raises:
            FileNotFoundError: There is none.
            RemoteError: No try got an answer.
        """
        return self._begin(self._whole([path, otherwise or path])).result()

    def names(self) -> list[str]:
        """The names of all files below the place."""
        return self._begin(self._tried("", self._list, verb="listed")).result()

    def find(self, path: str) -> bytes | None:
        """All bytes of a file, or None if there is none."""
        return self._begin(self._tried(path, lambda: self._get(path, None))).result()

    def put(self, path: str, data: bytes) -> "Future[None]":
        """Begin to write a whole file, over one that is there."""
        work = self._tried(path, lambda: self._set(path, data), verb="written", size=len(data))
        return self._begin(work)

    def claim(self, path: str, data: bytes) -> bytes:
        """Write a small file unless there is one, and return what is there then.

        Of several who claim a name at once, one gets it, where the service can do that.
        """
        self._begin(self._tried(path, lambda: self._set_new(path, data), verb="written")).result()
        return self.read(path)

    def size(self, path: str) -> int | None:
        """Bytes of a file, or None if there is none."""
        return self._begin(self._tried(path, lambda: self._size(path))).result()

    def remove(self, path: str) -> None:
        """Remove a file."""
        self._begin(self._tried(path, lambda: self._delete(path), verb="removed")).result()

    def _begin(self, work: "Coroutine[Any, Any, Answer]") -> "Future[Answer]":
        with self._lock:
            if self._process != os.getpid():  # a forked child has no threads
                self._process = os.getpid()
                self._loop = asyncio.new_event_loop()
                self._place: Any = None
                threading.Thread(target=self._loop.run_forever, daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _whole(self, paths: Sequence[str]) -> bytes:
        found = await self._first(paths, None)
        if found is None:
            raise FileNotFoundError(f"{self.name}/{paths[-1]}: there is no such file")
        return found

    async def _range(self, paths: Sequence[str], start: int, length: int) -> bytes:
        request = importlib.import_module("zarr.abc.store").RangeByteRequest(start, start + length)
        found = await self._first(paths, request)
        path = paths[-1]
        if found is None:
            raise DamagedError(
                f"{self.name}/{path}: is missing, and the manifest lists it; restore it from a copy"
            )
        if len(found) != length:
            raise DamagedError(
                f"{self.name}/{path}: ends before byte {start + length}; it was cut or replaced, "
                f"restore it from a copy"
            )
        return found

    async def _first(self, paths: Sequence[str], request: Any) -> bytes | None:
        """What is read of the first file that there is."""
        for path in dict.fromkeys(paths):
            found = await self._tried(path, partial(self._get, path, request))
            if found is not None:
                return found
        return None

    async def _tried(
        self,
        path: str,
        once: Callable[[], Awaitable[Answer]],
        *,
        verb: str = "read",
        size: int = 0,
    ) -> Answer:
        """What one of the tries gives; ``verb`` and ``size`` say what they do with how much."""
        reason: BaseException | None = None
        for attempt in range(self._retries.attempts):
            if attempt:
                wait = self._retries.first_wait * 2 ** (attempt - 1)
                await asyncio.sleep(wait * (0.75 + random.random() / 2))
            try:
                return await asyncio.wait_for(once(), self._retries.timeout + size / _SLOWEST)
            except PermissionError as error:
                raise self._denied(path, error) from error
            except _transient() as error:
                if isinstance(error, _FINAL):
                    raise
                if type(error).__name__ in _DENIED:
                    raise self._denied(path, error) from error
                reason = error
        text = str(reason).splitlines()[0] if str(reason) else type(reason).__name__
        raise RemoteError(
            f"{self.name}/{path}: can't be {verb} after {self._retries.attempts} tries ({text}); "
            f"check the network and the service, then try again"
        ) from reason

    def _denied(self, path: str, error: BaseException) -> PermissionError:
        number = getattr(error, "errno", None) or errno.EACCES
        return PermissionError(number, "access denied", f"{self.name}/{path}")

    def _opened(self) -> Any:
        if self._place is None:
            self._place = self._open_place()
        return self._place

    async def _get(self, path: str, request: Any) -> bytes | None:
        prototype = importlib.import_module("zarr.core.buffer").default_buffer_prototype()
        try:
            found = await self._opened().get(path, prototype=prototype, byte_range=request)
        except _FINAL:
            return None
        return None if found is None else bytes(found.to_bytes())

    async def _set(self, path: str, data: bytes) -> None:
        with self._in_a_bucket():
            await self._opened().set(path, _buffer(data))

    async def _set_new(self, path: str, data: bytes) -> None:
        with self._in_a_bucket():
            await self._opened().set_if_not_exists(path, _buffer(data))

    @contextmanager
    def _in_a_bucket(self) -> Iterator[None]:
        try:
            yield
        except _FINAL:  # the libraries' texts say this at great length
            raise FileNotFoundError(
                f"{self.name}: there is no such bucket or folder; make it first"
            ) from None

    async def _size(self, path: str) -> int | None:
        try:
            return int(await self._opened().getsize(path))
        except _FINAL:
            return None

    async def _list(self) -> list[str]:
        return [name async for name in self._opened().list()]

    async def _delete(self, path: str) -> None:
        await self._opened().delete(path)


def _buffer(data: bytes) -> Any:
    return importlib.import_module("zarr.core.buffer.cpu").Buffer.from_bytes(data)


def _transient() -> tuple[type[BaseException], ...]:
    known: list[type[BaseException]] = [OSError, TimeoutError, EOFError]
    for module, name in _TRANSIENT.items():
        found = sys.modules.get(module)
        if found is not None and hasattr(found, name):
            known.append(getattr(found, name))
    return tuple(known)


def zarr_store(url: str, options: Mapping[str, Any], *, read_only: bool = True) -> Any:
    """The zarr store at a URL: through obstore if it is installed, else through fsspec.

    Raises:
        ImportError: Neither can open it; the message names the extra.
    """
    storage = importlib.import_module("zarr.storage")
    scheme = url.partition("://")[0]
    try:
        if scheme in {"s3", "gs", "az", "http", "https"} and hasattr(storage, "ObjectStore"):
            obstore = importlib.import_module("obstore.store")
            return storage.ObjectStore(obstore.from_url(url, **options), read_only=read_only)
    except ImportError:
        pass
    # fsspec would give all of us one connection, which is bound to the event loop of the first.
    options = {"skip_instance_cache": True, **options}
    if scheme == "file" and not read_only:  # object stores have no folders to be made
        options["auto_mkdir"] = True
    try:
        return storage.FsspecStore.from_url(url, storage_options=dict(options), read_only=read_only)
    except ImportError as error:
        raise ImportError(
            f"{url}: {scheme} needs obstore (or fsspec with its driver): "
            f"pip install 'mds-data[remote]' ({error})"
        ) from error
