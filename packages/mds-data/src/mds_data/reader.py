"""Read token stores at the speed of a memory map.

Shards are mapped at their first touch, and each inner chunk's checksum is compared at its first
touch. A read inside a chunk is a view, across chunks one copy. There are no locks: every cache is
filled by one atomic dictionary operation, so threads and forked workers may share a store.
"""

import mmap
import os
import sys
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mds_data.errors import DamagedError, StoreError
from mds_data.folder import StoreFolder
from mds_data.shard import (
    ArrayLayout,
    array_layout_from_json,
    decode_chunk,
    decode_index,
    lies_in_order,
)

__all__ = ["ShardedArray", "TokenSource"]

_RAW_VIEWS = 2**16
"""Chunk views kept of an array in the hot layout; a view costs about 200 bytes."""
_DECODED_CHUNKS = 64
"""Decompressed chunks kept of an array in the archive layout."""


class TokenSource(Protocol):
    """A row of tokens that can be read by position."""

    @property
    def length(self) -> int:
        """Number of tokens."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the tokens."""
        ...

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """The tokens from ``start`` to ``stop``; don't write into what you get."""
        ...

    def close(self) -> None:
        """Let the files go."""
        ...


class _MappedShard:
    """One shard file in memory, with its checked index."""

    def __init__(
        self, folder: StoreFolder, relative: str, *, layout: ArrayLayout, used: int
    ) -> None:
        self.name = str(folder.root / relative)
        handle, size = folder.open(relative)
        try:
            if size < layout.index_size:
                raise DamagedError(f"{self.name}: is too short to hold a shard index; it was cut")
            mapped = _map(handle)
        finally:
            os.close(handle)
        self._map = mapped
        self.bytes: NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)
        tail = self.bytes[size - layout.index_size :].tobytes()
        self.index = decode_index(tail, layout=layout, file_size=size, used=used, name=self.name)
        self.in_order = lies_in_order(self.index, layout=layout, used=used)

    def chunk(self, number: int) -> NDArray[np.uint8]:
        """The bytes of an inner chunk, fetched in one go although the map is read at random."""
        offset, length = (int(value) for value in self.index[number])
        if hasattr(mmap, "MADV_WILLNEED"):
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, start, offset + length - start)
        return self.bytes[offset : offset + length]


def _map(handle: int) -> mmap.mmap:
    if sys.version_info >= (3, 13) and sys.platform != "win32":
        mapped = mmap.mmap(handle, 0, access=mmap.ACCESS_READ, trackfd=False)
    else:
        mapped = mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):  # shuffled reads: 5 times faster from a cold disk
        mapped.madvise(mmap.MADV_RANDOM)
    return mapped


def _most_maps() -> int:
    """How many shards may be mapped at once: each map holds a file open before Python 3.13."""
    if sys.platform == "win32" or sys.version_info >= (3, 13):
        return 2**20
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else max(16, soft // 2)


class ShardedArray:
    """A 1-D array of a store, read chunk by chunk.

    Args:
        folder: The store's folder.
        name: The array's path inside it.
    """

    def __init__(self, folder: StoreFolder, name: str) -> None:
        self.name = name
        self._folder = folder
        metadata = f"{name}/zarr.json"
        self.layout = array_layout_from_json(
            folder.read(metadata), name=str(folder.root / metadata)
        )
        self.length = self.layout.length
        self.dtype = self.layout.dtype
        self._chunk_length = self.layout.chunk
        self._most_views = _DECODED_CHUNKS if self.layout.compressed else _RAW_VIEWS
        self._most_shards = _most_maps()
        self._views: dict[int, NDArray[Any]] = {}
        self._shards: dict[int, _MappedShard] = {}
        self._checked = bytearray(self.layout.num_chunks)
        self._closed = False
        for number in range(self.layout.num_shards):
            if f"{name}/c/{number}" not in folder.manifest.files:
                raise DamagedError(
                    f"{folder.root / name}/c/{number}: the array needs this shard, and the "
                    f"manifest does not list it; the store is not whole, restore it from a copy"
                )

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """The elements from ``start`` to ``stop``: a view inside a chunk, else a copy."""
        count = stop - start
        number, offset = divmod(start, self._chunk_length)
        view = self._views.get(number)
        if view is not None:
            part = view[offset : offset + count]
            if len(part) == count:
                return part
        return self._read_slowly(start, stop)

    def _read_slowly(self, start: int, stop: int) -> NDArray[Any]:
        if not 0 <= start <= stop <= self.length:
            raise IndexError(
                f"{self._folder.root / self.name}: can't read from {start} to {stop}; "
                f"the array holds {self.length}"
            )
        if start == stop:
            return np.empty(0, self.layout.dtype)
        chunk = self._chunk_length
        first, last = start // chunk, (stop - 1) // chunk
        parts = [
            self._view(number)[max(start - number * chunk, 0) : stop - number * chunk]
            for number in range(first, last + 1)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read_all(self) -> NDArray[Any]:
        """The whole array."""
        return self._read_slowly(0, self.length)

    def _view(self, number: int) -> NDArray[Any]:
        """One inner chunk, cut at the array's end; its checksum was compared."""
        view = self._views.get(number)
        if view is not None:
            return view
        inside = min(self._chunk_length, self.length - number * self._chunk_length)
        view = self._load(number)[:inside]
        if len(self._views) >= self._most_views:
            self._views = {}
        self._views[number] = view
        return view

    def _load(self, number: int) -> NDArray[Any]:
        shard_number, inner = divmod(number, self.layout.chunks_per_shard)
        shard = self._shard(shard_number)
        data = shard.chunk(inner)
        if self._checked[number] and not self.layout.compressed:
            return data[:-4].view(self.layout.dtype)
        name = f"{shard.name} chunk {inner}"
        values = decode_chunk(data, layout=self.layout, name=name)
        self._checked[number] = 1
        return values

    def _shard(self, number: int) -> _MappedShard:
        shard = self._shards.get(number)
        if shard is not None:
            return shard
        if self._closed:
            raise StoreError(f"{self._folder.root}: the store was closed; open it again")
        if len(self._shards) >= self._most_shards:
            self._shards, self._views = {}, {}
        per_shard = self.layout.chunks_per_shard
        used = min(per_shard, self.layout.num_chunks - number * per_shard)
        relative = f"{self.name}/c/{number}"
        mapped = _MappedShard(self._folder, relative, layout=self.layout, used=used)
        return self._shards.setdefault(number, mapped)

    def close(self) -> None:
        """Let the maps go; views that were handed out stay valid."""
        self._closed = True
        self._shards, self._views = {}, {}
