"""Files on their way to object storage: several at once, and each looked for at its destination."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from mds_data.store.remote_array import RemoteOptions
from mds_data.store.remote_files import RemoteError, RemoteFiles, zarr_store

__all__ = ["OnBytes", "Sending", "writable_place"]

_IN_FLIGHT = 2**27
"""Bytes of files that are sent at once; a larger file is sent alone."""

OnBytes = Callable[[int], None]


def writable_place(location: Any, options: RemoteOptions | None) -> RemoteFiles:
    """The files below a URL, or in a zarr store."""
    options = options or RemoteOptions()
    if not isinstance(location, str):
        return RemoteFiles(lambda: location, name=str(location), retries=options.retries)
    url = location.rstrip("/")
    place = partial(zarr_store, url, options.storage, read_only=False)
    return RemoteFiles(place, name=url, retries=options.retries)


class Sending:
    """Sends files beside each other, some bytes at a time."""

    def __init__(self, files: RemoteFiles, *, on_bytes: OnBytes | None = None) -> None:
        self._files = files
        self._on_bytes = on_bytes
        self._waiting: deque[tuple[str, int, Future[None]]] = deque()
        self._in_flight = 0

    def put(self, path: str, read: Callable[[], bytes]) -> None:
        """Send a file; it is read when those before it leave room."""
        data = read()
        while self._waiting and self._in_flight + len(data) > _IN_FLIGHT:
            self._settle()
        self._waiting.append((path, len(data), self._files.put(path, data)))
        self._in_flight += len(data)

    def finish(self) -> None:
        """Wait until all have arrived."""
        while self._waiting:
            self._settle()

    def _settle(self) -> None:
        path, size, coming = self._waiting.popleft()
        coming.result()
        self._in_flight -= size
        found = self._files.size(path)
        if found != size:
            raise RemoteError(
                f"{self._files.name}/{path}: {size} bytes were sent, and "
                f"{'nothing' if found is None else found} lies there; try again"
            )
        if self._on_bytes is not None:
            self._on_bytes(size)
