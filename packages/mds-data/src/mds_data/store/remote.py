"""Token stores on object storage, or behind anything that zarr can reach, with the same interface.

Chunks are fetched when they are touched, neighbours in one request; whoever reads forward finds
the next chunks on their way already. Each chunk's checksum is compared, from the network and from
the local cache alike.
"""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mds_data.errors import DamagedError, StoreError
from mds_data.store.array_metadata import ArrayLayout, array_layout_from_json
from mds_data.store.chunk_cache import ChunkCache
from mds_data.store.commit import pending_name
from mds_data.store.records import Manifest
from mds_data.store.remote_files import RemoteFiles, RetryPolicy, zarr_store
from mds_data.store.schema import MANIFEST_LIMIT, MANIFEST_NAME, manifest_from_json
from mds_data.store.shard import decode_chunk, decode_index
from mds_data.store.token_store import TokenStore

__all__ = ["RemoteOptions", "RemotePart", "RemoteTokenStore", "open_remote_store"]

_LARGEST_REQUEST = 2**23
"""Bytes of neighbouring chunks that one request asks for."""
_DEEPEST = 4


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
    read_ahead: int = 8
    """Chunks that are fetched ahead of one who reads forward."""
    retries: RetryPolicy = field(default_factory=RetryPolicy)


class _Location:
    """The place of a store, where other stores have a path."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    def __truediv__(self, other: str) -> "_Location":
        return _Location(f"{self.name}/{other}")


class _RemoteArray:
    """A 1-D array of a store, fetched chunk by chunk."""

    def __init__(
        self, part: "RemotePart", name: str, *, options: RemoteOptions, cache: ChunkCache | None
    ) -> None:
        self._part = part
        self._name = name
        self._cache = cache
        self._options = options
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
        step = max(1, min(self._most // 2, 64))
        self._own_process()
        with self._lock:
            ahead = self._options.read_ahead if first in {self._last, self._last + 1} else 0
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
        while len(self._coming) > 4 * self._options.read_ahead + 64:  # fetched for nothing
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


class RemotePart:
    """The arrays of one folder: an ordinary store, or one segment of a merged one."""

    def __init__(
        self,
        files: RemoteFiles,
        prefix: str,
        manifest: Manifest,
        digest: str,
        options: RemoteOptions,
    ) -> None:
        self.root = cast("Path", _Location(f"{files.name}/{prefix}".rstrip("/")))
        self.manifest = manifest
        self.num_documents = manifest.counts.documents
        self._files = files
        self._prefix = prefix
        self._options = options
        self._cache = None
        if options.cache is not None:
            store = (manifest.uuid, digest)
            self._cache = ChunkCache(Path(options.cache), store, options.cache_bytes)
        self._names: dict[str, str] = {}
        self.tokens = self._array("tokens", self._cache)
        if self.tokens.layout.dtype != np.dtype(manifest.dtype).newbyteorder("<"):
            raise DamagedError(
                f"{self.root}: the tokens are {self.tokens.layout.dtype}, and the manifest says "
                f"{manifest.dtype}"
            )

    def _array(self, name: str, cache: ChunkCache | None) -> _RemoteArray:
        return _RemoteArray(self, name, options=self._options, cache=cache)

    def document_array(self, name: str) -> NDArray[Any]:
        """An array with one entry a document."""
        array = self._array(name, self._cache)
        if array.length != self.num_documents:
            raise DamagedError(
                f"{self.root}/{name}: holds {array.length} entries for "
                f"{self.num_documents} documents"
            )
        return array.read_all()

    def sentence_length(self) -> NDArray[np.int32]:
        """Tokens of each sentence."""
        return self._array("sentence_length", self._cache).read_all()

    def bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and length of each document, checked to be in order and inside ``tokens``."""
        return checked_bounds(
            self.document_array("doc_start"),
            self.document_array("doc_length"),
            length_of_tokens=self.tokens.length,
            name=str(self.root),
        )

    def start(self, path: str, start: int, length: int) -> "Future[bytes]":
        """Begin to read a range of a file that the manifest names."""
        return self._files.start(self._prefix + self._current(path), start, length)

    def read_file(self, path: str) -> bytes:
        """All bytes of a file that the manifest names, which must be the very ones."""
        if path not in self.manifest.files:
            raise DamagedError(f"{self.root}/{path}: the manifest does not list this file")
        record = self.manifest.files[path]
        try:
            data = self._files.read(self._prefix + self._current(path))
        except FileNotFoundError:
            raise DamagedError(
                f"{self.root}/{path}: is missing, and the manifest lists it; restore it from a copy"
            ) from None
        if hashlib.sha256(data).hexdigest() != record.sha256:
            raise DamagedError(
                f"{self.root}/{path}: the content differs from the manifest's digest; restore it "
                f"from a copy"
            )
        return data

    def _current(self, path: str) -> str:
        """The name under which a file lies; a copy may be of a store that was being changed."""
        if self.manifest.revision == 1:
            return path
        if path not in self._names:
            waiting = pending_name(path, revision=self.manifest.revision)
            try:
                self._files.start(self._prefix + waiting, 0, 1).result()
            except DamagedError:
                self._names[path] = path
            else:
                self._names[path] = waiting
        return self._names[path]


def checked_bounds(
    start: NDArray[Any], length: NDArray[Any], *, length_of_tokens: int, name: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Start and length of each document after a check that they are in order and inside."""
    start, length = (each.astype(np.int64, copy=False) for each in (start, length))
    if not len(start):
        return start, length
    fault = (start < 0) | (length < 0) | (length > length_of_tokens - start)
    fault[1:] |= start[1:] < start[:-1] + length[:-1]
    if fault.any():
        number = int(np.flatnonzero(fault)[0])
        raise DamagedError(
            f"{name}: document {number} starts at {start[number]} with {length[number]} tokens, "
            f"which overlaps its neighbour or leaves the {length_of_tokens} tokens; restore "
            f"doc_start and doc_length from a copy"
        )
    return start, length


class RemoteTokenStore(TokenStore):
    """A token store behind a network; everything that `TokenStore` does.

    It can be sent to other processes if it was opened by its URL.
    """

    _reopen: tuple[str, RemoteOptions] | None = None

    def read_file(self, path: str) -> bytes:
        """All bytes of a file of the store, such as its tokenizer."""
        part = cast("RemotePart", self.parts[0])
        return part.read_file(path)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._reopen is None:
            raise StoreError(f"{self.path}: was opened from an object; open it by its URL instead")
        return _reopened, (*self._reopen, self.manifest.uuid, self.manifest.revision)


def open_remote_store(location: Any, *, options: RemoteOptions | None = None) -> RemoteTokenStore:
    """Open a token store behind a network.

    Args:
        location: A URL such as ``s3://bucket/store``, or a zarr store whose root is the store.
        options: How it is read.

    Raises:
        FileNotFoundError: There is no store.
        StoreError: What is there can't be trusted.
        RemoteError: No try got an answer.
    """
    options = options or RemoteOptions()
    url = location.rstrip("/") if isinstance(location, str) else None
    place = partial(zarr_store, url, options.storage) if url is not None else lambda: location
    files = RemoteFiles(place, name=url or str(location), retries=options.retries)
    manifest, data = _manifest(files, "")
    parts = list(_parts(files, "", manifest, data, options))
    path = cast("Path", _Location(files.name))
    store = RemoteTokenStore(path, manifest, parts)
    store._reopen = None if url is None else (url, options)
    return store


def _manifest(files: RemoteFiles, prefix: str) -> tuple[Manifest, bytes]:
    name = f"{files.name}/{prefix}{MANIFEST_NAME}"
    try:
        data = files.read(prefix + MANIFEST_NAME)
    except FileNotFoundError:
        raise FileNotFoundError(f"{files.name}/{prefix}: there is no such store") from None
    if len(data) > MANIFEST_LIMIT:
        raise StoreError(f"{name}: has {len(data)} bytes, too many for a manifest")
    return manifest_from_json(data, name=name), data


def _parts(
    files: RemoteFiles,
    prefix: str,
    manifest: Manifest,
    data: bytes,
    options: RemoteOptions,
    *,
    depth: int = 0,
) -> Iterator[RemotePart]:
    if not manifest.segments:
        yield RemotePart(files, prefix, manifest, hashlib.sha256(data).hexdigest(), options)
        return
    if depth == _DEEPEST:
        raise StoreError(f"{files.name}: segments lie more than {_DEEPEST} deep")
    for segment in manifest.segments:
        inner = f"{prefix}{segment.path}/"
        found, inner_data = _manifest(files, inner)
        if hashlib.sha256(inner_data).hexdigest() != segment.manifest_sha256:
            raise DamagedError(
                f"{files.name}/{inner}: is not the segment that was merged; restore it from a copy"
            )
        yield from _parts(files, inner, found, inner_data, options, depth=depth + 1)


def _reopened(url: str, options: RemoteOptions, uuid: str, revision: int) -> RemoteTokenStore:
    store = open_remote_store(url, options=options)
    if (store.manifest.uuid, store.manifest.revision) != (uuid, revision):
        raise StoreError(f"{url}: was replaced or changed since it was opened elsewhere")
    return store
