"""Bytes of a store that lies behind a network: ranges, retries, a time limit, a local cache.

Everything goes through zarr's store interface, so what zarr can reach can be read here: fsspec's
file systems, obstore's object stores, zip files, memory.
"""

import asyncio
import hashlib
import importlib
import os
import random
import secrets
import shutil
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mds_data.errors import DamagedError

__all__ = ["ChunkCache", "RemoteError", "RemoteFiles", "RetryPolicy", "zarr_store"]

_TRANSIENT = {
    "aiohttp": "ClientError",
    "botocore.exceptions": "BotoCoreError",
    "obstore.exceptions": "BaseError",
}
"""Errors of libraries that don't derive from OSError, by the module that must be loaded."""
_FINAL = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


class RemoteError(OSError):
    """A file behind the network could not be read, after all tries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How often, how long apart and how patiently a read is tried."""

    attempts: int = 5
    first_wait: float = 0.2
    """Seconds before the second try; twice as long before each further one, and some chance."""
    timeout: float = 60.0
    """Seconds after which a try counts as failed."""

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_wait < 0 or self.timeout <= 0:
            raise ValueError("a read needs at least one attempt and some time")


class RemoteFiles:
    """Reads files below one place; every read may run beside others.

    Args:
        open_place: Makes zarr's store; called in each process that reads.
        name: How messages call the place.
        retries: How a read is tried again.
    """

    def __init__(
        self, open_place: Callable[[], Any], *, name: str, retries: RetryPolicy | None = None
    ) -> None:
        self.name = name
        self._open_place = open_place
        self._retries = retries or RetryPolicy()
        self._process = -1
        self._lock = threading.Lock()

    def start(self, path: str, start: int, length: int) -> "Future[bytes]":
        """Begin to read ``length`` bytes of a file."""
        return self._begin(self._range(path, start, length))

    def read(self, path: str) -> bytes:
        """All bytes of a file.

        Raises:
            FileNotFoundError: There is none.
            RemoteError: No try got an answer.
        """
        return self._begin(self._whole(path)).result()

    def _begin(self, work: "Coroutine[Any, Any, bytes]") -> "Future[bytes]":
        with self._lock:
            if self._process != os.getpid():  # a forked child has no threads
                self._process = os.getpid()
                self._loop = asyncio.new_event_loop()
                self._place: Any = None
                threading.Thread(target=self._loop.run_forever, daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _whole(self, path: str) -> bytes:
        found = await self._tried(path, None)
        if found is None:
            raise FileNotFoundError(f"{self.name}/{path}: there is no such file")
        return found

    async def _range(self, path: str, start: int, length: int) -> bytes:
        request = importlib.import_module("zarr.abc.store").RangeByteRequest(start, start + length)
        found = await self._tried(path, request)
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

    async def _tried(self, path: str, request: Any) -> bytes | None:
        """The bytes, or None if there is no such file."""
        reason: BaseException | None = None
        for attempt in range(self._retries.attempts):
            if attempt:
                wait = self._retries.first_wait * 2 ** (attempt - 1)
                await asyncio.sleep(wait * (0.75 + random.random() / 2))
            try:
                return await asyncio.wait_for(self._once(path, request), self._retries.timeout)
            except PermissionError as error:
                raise PermissionError(
                    error.errno or 13, "access denied", f"{self.name}/{path}"
                ) from error
            except _FINAL:
                return None
            except _transient() as error:
                reason = error
        text = str(reason).splitlines()[0] if str(reason) else type(reason).__name__
        raise RemoteError(
            f"{self.name}/{path}: can't be read after {self._retries.attempts} tries ({text}); "
            f"check the network and the service, then try again"
        ) from reason

    async def _once(self, path: str, request: Any) -> bytes | None:
        if self._place is None:
            self._place = self._open_place()
        prototype = importlib.import_module("zarr.core.buffer").default_buffer_prototype()
        found = await self._place.get(path, prototype=prototype, byte_range=request)
        return None if found is None else bytes(found.to_bytes())


def _transient() -> tuple[type[BaseException], ...]:
    known: list[type[BaseException]] = [OSError, TimeoutError, EOFError]
    for module, name in _TRANSIENT.items():
        found = sys.modules.get(module)
        if found is not None and hasattr(found, name):
            known.append(getattr(found, name))
    return tuple(known)


def zarr_store(url: str, options: Mapping[str, Any]) -> Any:
    """The zarr store at a URL: through obstore if it is installed, else through fsspec.

    Raises:
        ImportError: Neither can open it; the message names the extra.
    """
    storage = importlib.import_module("zarr.storage")
    scheme = url.partition("://")[0]
    try:
        if scheme in {"s3", "gs", "az", "http", "https"} and hasattr(storage, "ObjectStore"):
            obstore = importlib.import_module("obstore.store")
            return storage.ObjectStore(obstore.from_url(url, **options), read_only=True)
    except ImportError:
        pass
    try:
        return storage.FsspecStore.from_url(url, storage_options=dict(options), read_only=True)
    except ImportError as error:
        raise ImportError(
            f"{url}: reading from {scheme} needs obstore (or fsspec with its driver): "
            f"pip install 'mds-data[remote]' ({error})"
        ) from error


@dataclass(slots=True)
class ChunkCache:
    """Chunks of one store on the local disk, the least recently used go first.

    Args:
        folder: Of the cache; several stores and processes may share it.
        store: What the chunks belong to: uuid and digest of the manifest. Chunks of other
            revisions of the same store are removed, so that nothing erased stays.
        limit: Bytes of chunks that may lie in the folder, of all stores together.
    """

    folder: Path
    store: tuple[str, str]
    limit: int
    _written: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        own = hashlib.sha256(self.store[0].encode()).hexdigest()[:32]
        place = self.folder / own / self.store[1]
        place.mkdir(parents=True, exist_ok=True)
        for other in place.parent.iterdir():
            if other != place:
                shutil.rmtree(other, ignore_errors=True)

    def path(self, name: str) -> Path:
        """Where a chunk is kept."""
        own = hashlib.sha256(self.store[0].encode()).hexdigest()[:32]
        return self.folder / own / self.store[1] / hashlib.sha256(name.encode()).hexdigest()

    def get(self, name: str) -> bytes | None:
        """A chunk, if it is there."""
        path = self.path(name)
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        return data

    def put(self, name: str, data: bytes) -> None:
        """Keep a chunk; a full disk is no error, the chunk is just not kept."""
        path = self.path(name)
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        try:
            partial.write_bytes(data)
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            return
        if not self._written or self._written > self.limit // 8:
            self._written = 0
            self._shrink()
        self._written += len(data)

    def drop(self, name: str) -> None:
        """Forget a chunk that turned out to be damaged."""
        self.path(name).unlink(missing_ok=True)

    def _shrink(self) -> None:
        found = []
        for path in self.folder.rglob("*"):
            with suppress(OSError):
                status = path.stat()
                if path.is_file():
                    found.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.limit - self.limit // 8:
                return
            path.unlink(missing_ok=True)
            total -= size
