"""One array of a store behind a network, fetched chunk by chunk.

Chunks are fetched when they are touched, neighbours in one request; whoever reads forward finds
the next chunks on their way already. Each chunk's checksum is compared, from the network and from
the local cache alike.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mds_data.errors import DamagedError, StoreError
from mds_data.store.array_metadata import ArrayLayout, array_layout_from_json
from mds_data.store.chunk_cache import ChunkCache
from mds_data.store.records import Manifest
from mds_data.store.remote_files import RetryPolicy
from mds_data.store.shard import decode_chunk, decode_index

__all__ = ["RemoteArray", "RemoteFolder", "RemoteOptions"]

_LARGEST_REQUEST = 2**23
"""Bytes of neighbouring chunks that one request asks for."""
_READ_AHEAD = 2**20


class RemoteFolder(Protocol):
    """The files that one manifest names."""

    root: Path
    manifest: Manifest

    def start(self, path: str, start: int, length: int) -> "Future[bytes]":
        """Begin to read a range of a file."""
        ...

    def read_file(self, path: str) -> bytes:
        """All bytes of a file, which must be the very ones."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteOptions:
    """How a store behind a network is read."""

    storage: Mapping[str, Any] = field(default_factory=dict)
    """For the library that opens the URL, such as keys and an endpoint."""
    cache: Path | None = None
    """A local folder in which chunks are kept."""
    cache_bytes: int = 10 * 2**30
    """How large that folder may become."""
    memory_bytes: int = 128 * 2**20
    """Chunks that are kept in memory, for each array."""
    read_ahead: int | None = None
    """Chunks that are fetched ahead of one who reads forward; 1 MiB of tokens if None."""
    retries: RetryPolicy = field(default_factory=RetryPolicy)


class RemoteArray:
    """A 1-D array of a store, fetched chunk by chunk."""

    def __init__(
        self, part: RemoteFolder, name: str, *, options: RemoteOptions, cache: ChunkCache | None
    ) -> None:
        self._part = part
        self._name = name
        self._cache = cache
        metadata = f"{name}/zarr.json"
        self.layout: ArrayLayout = array_layout_from_json(
            part.read_file(metadata), name=f"{part.root}/{metadata}"
        )
        self.length = self.layout.length
        self.dtype = self.layout.dtype
        self._indexes: dict[int, NDArray[np.uint64]] = {}
        self._coming: OrderedDict[int, Future[bytes]] = OrderedDict()
        self._chunks: OrderedDict[int, NDArray[Any]] = OrderedDict()
        self._offsets: dict[int, int] = {}
        self._most = max(2, options.memory_bytes // self.layout.chunk_size)
        usual = _READ_AHEAD // self.layout.chunk_size + 1
        self._ahead = usual if options.read_ahead is None else options.read_ahead
        self._last = -2
        self._lock = Lock()
        self._process = os.getpid()
        self._closed = False
        for number in range(self.layout.num_shards):
            if f"{name}/c/{number}" not in part.manifest.files:
                raise DamagedError(
                    f"{part.root}/{name}/c/{number}: the array needs this shard, and the manifest "
                    f"does not list it; the store is not whole, restore it from a copy"
                )

    @property
    def read(self) -> Callable[[int, int], NDArray[Any]]:
        """``read(start, stop)`` gives those elements."""
        return self._read

    def _read(self, start: int, stop: int) -> NDArray[Any]:
        if not 0 <= start <= stop <= self.length:
            raise IndexError(
                f"{self._part.root}/{self._name}: can't read from {start} to {stop}; the array "
                f"holds {self.length}"
            )
        if start == stop:
            return np.empty(0, self.dtype)
        if self._closed:
            raise StoreError(f"{self._part.root}: the store was closed; open it again")
        chunk = self.layout.chunk
        first, last = start // chunk, (stop - 1) // chunk
        parts: list[NDArray[Any]] = []
        step = max(1, min(self._most // 2, _LARGEST_REQUEST // self.layout.chunk_size))
        self._own_process()
        with self._lock:
            ahead = self._ahead if first in {self._last, self._last + 1} else 0
            for begin in range(first, last + 1, step):
                end = min(begin + step, last + 1)
                # Asked for again when half of it was used, so that requests stay large.
                halfway = end + ahead // 2
                known = halfway in self._coming or halfway in self._chunks
                self._order(range(begin, min(end + ahead * (not known), self.layout.num_chunks)))
                for number in range(begin, end):
                    low = max(start - number * chunk, 0)
                    parts.append(self._chunk(number)[low : stop - number * chunk])
            self._last = last
        result = parts[0] if len(parts) == 1 else np.concatenate(parts)
        result.flags.writeable = False
        return result

    def _own_process(self) -> None:
        """Forget what another process, whose child this is, was waiting for."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._lock = Lock()
            self._coming.clear()
            self._offsets.clear()

    def _order(self, numbers: range) -> None:
        """Begin to fetch the chunks that are not here; neighbours in one request."""
        run: list[int] = []
        for number in numbers:
            known = number in self._chunks or number in self._coming
            new_shard = number % self.layout.chunks_per_shard == 0
            if run and (known or new_shard or self._size(run) > _LARGEST_REQUEST):
                self._request(run)
                run = []
            if known:
                continue
            if not self._from_cache(number):
                run.append(number)
            elif run:
                self._request(run)
                run = []
        if run:
            self._request(run)

    def _size(self, run: list[int]) -> int:
        return len(run) * self.layout.chunk_size

    def _request(self, run: list[int]) -> None:
        index = self._index(run[0] // self.layout.chunks_per_shard)
        inner = [number % self.layout.chunks_per_shard for number in run]
        start = int(index[inner[0], 0])
        length = int(index[inner[-1]].sum()) - start
        coming = self._part.start(self._shard_name(run[0]), start, length)
        for number, place in zip(run, inner, strict=True):
            self._coming[number] = coming
            self._offsets[number] = int(index[place, 0]) - start

    def _from_cache(self, number: int) -> bool:
        data = None if self._cache is None else self._cache.get(self._cache_name(number))
        if data is None:
            return False
        try:
            self._keep(number, np.frombuffer(data, np.uint8))
        except DamagedError:
            if self._cache is not None:
                self._cache.drop(self._cache_name(number))
            return False
        return True

    def _chunk(self, number: int) -> NDArray[Any]:
        found = self._chunks.get(number)
        if found is not None:
            self._chunks.move_to_end(number)
            return found
        if number not in self._coming:
            self._order(range(number, number + 1))
            if number in self._chunks:
                return self._chunks[number]
        coming = self._coming.pop(number)
        offset = self._offsets.pop(number)
        data = np.frombuffer(coming.result(), np.uint8)
        index = self._index(number // self.layout.chunks_per_shard)
        length = int(index[number % self.layout.chunks_per_shard, 1])
        piece = data[offset : offset + length]
        chunk = self._keep(number, piece)
        if self._cache is not None:
            self._cache.put(self._cache_name(number), piece.tobytes())
        return chunk

    def _keep(self, number: int, data: NDArray[np.uint8]) -> NDArray[Any]:
        shard, inner = divmod(number, self.layout.chunks_per_shard)
        name = f"{self._part.root}/{self._name}/c/{shard} chunk {inner}"
        inside = min(self.layout.chunk, self.length - number * self.layout.chunk)
        # A view would keep the whole answer of the request alive.
        values = decode_chunk(data, layout=self.layout, name=name)[:inside].copy()
        self._chunks[number] = values
        while len(self._chunks) > self._most:
            self._chunks.popitem(last=False)
        while len(self._coming) > 4 * self._ahead + 64:  # fetched for nothing
            old, _ = self._coming.popitem(last=False)
            self._offsets.pop(old, None)
        return values

    def _index(self, shard: int) -> NDArray[np.uint64]:
        found = self._indexes.get(shard)
        if found is not None:
            return found
        name = f"{self._name}/c/{shard}"
        size = self._part.manifest.files[name].size
        used = min(
            self.layout.chunks_per_shard,
            self.layout.num_chunks - shard * self.layout.chunks_per_shard,
        )
        if size < self.layout.index_size:
            raise DamagedError(f"{self._part.root}/{name}: is too short to hold a shard index")
        start = size - self.layout.index_size
        tail = self._part.start(name, start, self.layout.index_size).result()
        index = decode_index(
            tail, layout=self.layout, file_size=size, used=used, name=f"{self._part.root}/{name}"
        )
        self._indexes[shard] = index
        return index

    def _shard_name(self, number: int) -> str:
        return f"{self._name}/c/{number // self.layout.chunks_per_shard}"

    def _cache_name(self, number: int) -> str:
        return f"{self._part.root} {self._name} {number}"

    def read_all(self) -> NDArray[Any]:
        """The whole array."""
        return self._read(0, self.length)

    def close(self) -> None:
        """Let fetched chunks go."""
        self._closed = True
        self._chunks.clear()
        self._coming.clear()
        self._offsets.clear()
