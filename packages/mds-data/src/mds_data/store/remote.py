"""Token stores on object storage, or behind anything zarr can reach, with the same interface."""

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mds_data.errors import DamagedError, StoreError
from mds_data.store.chunk_cache import ChunkCache
from mds_data.store.document_bounds import checked_bounds
from mds_data.store.records import Manifest
from mds_data.store.remote_array import RemoteArray, RemoteOptions
from mds_data.store.remote_files import RemoteFiles, zarr_store
from mds_data.store.remote_folder import Location, RemoteStoreFolder, read_remote_manifest
from mds_data.store.token_store import TokenStore

__all__ = ["RemoteOptions", "RemotePart", "RemoteTokenStore", "open_remote_store"]

_DEEPEST = 4


class RemotePart(RemoteStoreFolder):
    """The arrays of one folder: an ordinary store, or one segment of a merged one."""

    def __init__(
        self,
        files: RemoteFiles,
        prefix: str,
        manifest: Manifest,
        digest: str,
        options: RemoteOptions,
    ) -> None:
        super().__init__(files, prefix, manifest)
        self.num_documents = manifest.counts.documents
        self._options = options
        self._cache = None
        if options.cache is not None:
            store = (manifest.uuid, digest)
            self._cache = ChunkCache(Path(options.cache), store, options.cache_bytes)
        self.tokens = self.array("tokens")
        if self.tokens.layout.dtype != np.dtype(manifest.dtype).newbyteorder("<"):
            raise DamagedError(
                f"{self.root}: the tokens are {self.tokens.layout.dtype}, and the manifest says "
                f"{manifest.dtype}"
            )

    def array(self, name: str) -> RemoteArray:
        """One array of the folder."""
        return RemoteArray(self, name, options=self._options, cache=self._cache)

    def document_array(self, name: str) -> NDArray[Any]:
        """An array with one entry a document."""
        array = self.array(name)
        if array.length != self.num_documents:
            raise DamagedError(
                f"{self.root}/{name}: holds {array.length} entries for "
                f"{self.num_documents} documents"
            )
        return array.read_all()

    def sentence_length(self) -> NDArray[np.int32]:
        """Tokens of each sentence."""
        return self.array("sentence_length").read_all()

    def bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and length of each document, checked to be in order and inside ``tokens``."""
        return checked_bounds(
            self.document_array("doc_start"),
            self.document_array("doc_length"),
            length_of_tokens=self.tokens.length,
            name=str(self.root),
        )


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
    manifest, data = read_remote_manifest(files)
    parts = list(_parts(files, "", manifest, data, options))
    path = cast("Path", Location(files.name))
    store = RemoteTokenStore(path, manifest, parts)
    store._reopen = None if url is None else (url, options)
    return store


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
        found, inner_data = read_remote_manifest(files, inner)
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
