"""Token stores on object storage, or behind anything zarr can reach, with the same interface."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mds_data.errors import DamagedError, StoreError
from mds_data.store.chunk_cache import ChunkCache
from mds_data.store.commit import pending_name
from mds_data.store.document_bounds import checked_bounds
from mds_data.store.records import Manifest
from mds_data.store.remote_array import RemoteArray, RemoteOptions
from mds_data.store.remote_files import RemoteFiles, zarr_store
from mds_data.store.schema import MANIFEST_LIMIT, MANIFEST_NAME, manifest_from_json
from mds_data.store.token_store import TokenStore

__all__ = ["RemoteOptions", "RemotePart", "RemoteTokenStore", "open_remote_store"]

_DEEPEST = 4


class _Location:
    """The place of a store, where other stores have a path."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    def __truediv__(self, other: str) -> "_Location":
        return _Location(f"{self.name}/{other}")


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

    def _array(self, name: str, cache: ChunkCache | None) -> RemoteArray:
        return RemoteArray(self, name, options=self._options, cache=cache)

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
