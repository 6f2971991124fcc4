"""Read token stores at the speed of a memory map.

Shards are mapped at their first touch, and each inner chunk's checksum is compared at its first
touch. A read inside a chunk is a view, across chunks one copy. There are no locks: every cache is
filled by one atomic dictionary operation, so threads and forked workers may share a store.
"""

import mmap
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mds_data.errors import DamagedError, StoreError
from mds_data.store.array_metadata import CHECKSUM_SIZE, ArrayLayout, array_layout_from_json
from mds_data.store.folder import StoreFolder
from mds_data.store.sealed_folder import SealedFolder
from mds_data.store.shard import decode_chunk, decode_index, lies_in_order

__all__ = ["ShardedArray", "TokenSource"]

_RAW_VIEWS = 2**16
"""Chunk views kept of an array in the hot layout; a view costs about 200 bytes."""
_DECODED_BYTES = 2**25
"""Bytes kept of chunks that had to be decompressed or deciphered, for each array."""


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

    @property
    def read(self) -> Callable[[int, int], NDArray[Any]]:
        """Gives the tokens from a start to a stop; don't write into what you get."""
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

    def fetch(self, number: int) -> None:
        """Begin to read a whole inner chunk from the disk, although the map is read at random."""
        if hasattr(mmap, "MADV_WILLNEED"):
            offset, length = self.index[number].tolist()
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, start, offset + length - start)

    def chunk(self, number: int) -> NDArray[np.uint8]:
        """The bytes of an inner chunk."""
        offset, length = self.index[number].tolist()
        return self.bytes[offset : offset + length]


class _SealedShard:
    """One encrypted shard; a chunk opens only the segments that it touches, which is one."""

    def __init__(
        self, folder: SealedFolder, relative: str, *, layout: ArrayLayout, used: int
    ) -> None:
        self.name = str(folder.root / relative)
        self._file = folder.file(relative)
        size = self._file.size
        if size < layout.index_size:
            raise DamagedError(f"{self.name}: is too short to hold a shard index; it was cut")
        tail = bytes(self._file.read(size - layout.index_size, size))
        self.index = decode_index(tail, layout=layout, file_size=size, used=used, name=self.name)

    def fetch(self, number: int) -> None:
        """Nothing: `chunk` reads what it opens."""

    def chunk(self, number: int) -> NDArray[np.uint8]:
        """The bytes of an inner chunk, opened."""
        offset, length = self.index[number].tolist()
        return np.frombuffer(self._file.read(offset, offset + length), np.uint8)


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


def _fast_reader(
    views: dict[int, NDArray[Any]], chunk: int, read_slowly: Callable[[int, int], NDArray[Any]]
) -> Callable[[int, int], NDArray[Any]]:
    """A reader that serves chunks whose checksums were compared, and leaves the rest to another.

    A closure with a mask for a division, because attributes and divisions would take a third of the
    time of a read. Chunks whose length is no power of two are always left to the other reader.

    Args:
        views: Whole chunks whose checksums were compared, by their first element.
        chunk: Elements of a chunk.
        read_slowly: Reads anything.
    """
    mask, two_chunks = chunk - 1, 2 * chunk
    join = np.concatenate

    def read(start: int, stop: int) -> NDArray[Any]:
        offset = start & mask
        first = start - offset
        end = stop - first
        try:
            if offset <= end <= chunk:
                return views[first][offset:end]
            if chunk < end <= two_chunks:
                return join((views[first][offset:], views[first + chunk][: end - chunk]))
        except KeyError:
            pass
        return read_slowly(start, stop)

    return read if chunk & mask == 0 else read_slowly


class ShardedArray:
    """A 1-D array of a store, read chunk by chunk.

    Args:
        folder: The store's folder.
        name: The array's path inside it.

    Attributes:
        read: ``read(start, stop)`` gives those elements: a view inside a chunk, else a copy.
    """

    read: Callable[[int, int], NDArray[Any]]

    def __init__(self, folder: StoreFolder | SealedFolder, name: str) -> None:
        self.name = name
        self._folder = folder
        metadata = f"{name}/zarr.json"
        self.layout = array_layout_from_json(
            folder.read(metadata), name=str(folder.root / metadata)
        )
        self.length = self.layout.length
        self.dtype = self.layout.dtype
        self._chunk_length = self.layout.chunk
        self._views_are_copies = self.layout.compressed or isinstance(folder, SealedFolder)
        decoded = max(1, _DECODED_BYTES // self.layout.chunk_size)
        self._most_views = decoded if self._views_are_copies else _RAW_VIEWS
        self._most_shards = _most_maps()
        self._views: dict[int, NDArray[Any]] = {}
        self._last: NDArray[Any] | None = None
        self._shards: dict[int, _MappedShard | _SealedShard] = {}
        self._checked: dict[int, bytearray] = {}
        self._closed = False
        self.read = _fast_reader(self._views, self._chunk_length, self._read_slowly)
        for number in range(self.layout.num_shards):
            if f"{name}/c/{number}" not in folder.manifest.files:
                raise DamagedError(
                    f"{folder.root / name}/c/{number}: the array needs this shard, and the "
                    f"manifest does not list it; the store is not whole, restore it from a copy"
                )

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
        first = number * self._chunk_length
        view = self._views.get(first)
        if view is not None:
            return view
        if self._last is not None and first + self._chunk_length > self.length:
            return self._last
        view = self._load(number)
        if first + self._chunk_length > self.length:
            # The fast reader sees whole chunks only, so that it need not look at the array's end.
            self._last = view = view[: self.length - first]
            return view
        if len(self._views) >= self._most_views:
            self._forget_some()
        self._views[first] = view
        return view

    def _forget_some(self) -> None:
        """Let the quarter of the chunks go that came first; many at once, as finding them costs."""
        for first in list(self._views)[: -(-self._most_views // 4)]:
            self._views.pop(first, None)

    def _load(self, number: int) -> NDArray[Any]:
        shard_number, inner = divmod(number, self.layout.chunks_per_shard)
        shard = self._shard(shard_number)
        checked = self._checked.get(shard_number)
        if checked is None:
            new = bytearray(self.layout.chunks_per_shard)
            checked = self._checked.setdefault(shard_number, new)
        if checked[inner] and not self._views_are_copies:
            return shard.chunk(inner)[:-CHECKSUM_SIZE].view(self.layout.dtype)
        shard.fetch(inner)
        data = shard.chunk(inner)
        name = f"{shard.name} chunk {inner}"
        authentic = isinstance(shard, _SealedShard)
        values = decode_chunk(data, layout=self.layout, name=name, authentic=authentic)
        checked[inner] = 1
        return values

    def _shard(self, number: int) -> _MappedShard | _SealedShard:
        shard = self._shards.get(number)
        if shard is not None:
            return shard
        if self._closed:
            raise StoreError(f"{self._folder.root}: the store was closed; open it again")
        if len(self._shards) >= self._most_shards:
            self._views.clear()
            self._last = None
            self._shards = {}
        per_shard = self.layout.chunks_per_shard
        used = min(per_shard, self.layout.num_chunks - number * per_shard)
        relative = f"{self.name}/c/{number}"
        if isinstance(self._folder, SealedFolder):
            sealed = _SealedShard(self._folder, relative, layout=self.layout, used=used)
            return self._shards.setdefault(number, sealed)
        mapped = _MappedShard(self._folder, relative, layout=self.layout, used=used)
        return self._shards.setdefault(number, mapped)

    def close(self) -> None:
        """Let the maps go; views that were handed out stay valid."""
        self._closed = True
        self._views.clear()
        self._last = None
        self._shards = {}
