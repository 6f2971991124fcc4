"""Open token stores: documents by number, tokens by position, over one folder or many segments."""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self, overload

import numpy as np
from numpy.typing import NDArray

from mds_data.encryption.keys import KeySource
from mds_data.errors import DamagedError, SealedError, StoreError
from mds_data.store.document_bounds import checked_bounds
from mds_data.store.folder import StoreFolder, is_store, read_manifest, read_manifest_bytes
from mds_data.store.indexed_dataset import pair_prefix, read_indexed_dataset
from mds_data.store.reader import ShardedArray, TokenSource
from mds_data.store.records import Manifest, Segment
from mds_data.store.sealed_folder import SealedFolder, is_sealed

__all__ = [
    "Part",
    "StorePart",
    "TokenStore",
    "check_expected",
    "checked_segment",
    "open_store",
    "store_parts",
]

_DEEPEST = 4
"""How deep segments may lie in segments."""
_ATTEMPTS = 10
"""How often a store is opened anew that a writer changes meanwhile."""


class Part(Protocol):
    """What a token store is made of: documents in one folder, or in one Megatron pair."""

    root: Path
    manifest: Manifest
    num_documents: int

    @property
    def tokens(self) -> TokenSource:
        """All tokens, gaps included."""
        ...

    def bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and length of each document."""
        ...

    def document_array(self, name: str) -> NDArray[Any]:
        """An array with one entry a document."""
        ...

    def sentence_length(self) -> NDArray[np.int32]:
        """Tokens of each sentence."""
        ...


class StorePart:
    """The arrays of one folder: an ordinary store, or one segment of a merged one."""

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        folder: StoreFolder | SealedFolder | None = None,
    ) -> None:
        self.root = root
        self.manifest = manifest
        self.folder: StoreFolder | SealedFolder = folder or StoreFolder(root, manifest)
        self.tokens = ShardedArray(self.folder, "tokens")
        self.num_documents = manifest.counts.documents
        if self.tokens.layout.dtype != np.dtype(manifest.dtype).newbyteorder("<"):
            raise DamagedError(
                f"{root}: the tokens are {self.tokens.layout.dtype}, and the manifest says "
                f"{manifest.dtype}"
            )

    def document_array(self, name: str) -> NDArray[Any]:
        """An array with one entry a document."""
        array = ShardedArray(self.folder, name)
        if array.length != self.num_documents:
            raise DamagedError(
                f"{self.root / name}: holds {array.length} entries for "
                f"{self.num_documents} documents"
            )
        return array.read_all()

    def sentence_length(self) -> NDArray[np.int32]:
        """Tokens of each sentence."""
        return ShardedArray(self.folder, "sentence_length").read_all()

    def bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and length of each document, checked to be in order and inside ``tokens``."""
        return checked_bounds(
            self.document_array("doc_start"),
            self.document_array("doc_length"),
            length_of_tokens=self.tokens.length,
            name=str(self.root),
        )


class TokenStore:
    """Token ids of many documents, opened for reading.

    ``store[i]`` is document ``i``, ``store[a:b]`` a list of documents, `tokens` any stretch of the
    row of all tokens. Arrays that come from a store are read-only.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        parts: Sequence[Part],
        *,
        key: KeySource | None = None,
    ) -> None:
        self.path = path
        self.manifest = manifest
        self._key = key
        self._parts = tuple(parts)
        lengths = [part.tokens.length for part in parts]
        self._bases = [sum(lengths[:index]) for index in range(len(lengths))]
        self._num_documents = sum(part.num_documents for part in parts)
        self._length = sum(lengths)
        if len(parts) == 1:  # spares a call on the way of every read
            self.__dict__["tokens"] = parts[0].tokens.read

    def __len__(self) -> int:
        return self._num_documents

    @overload
    def __getitem__(self, key: int) -> NDArray[Any]: ...

    @overload
    def __getitem__(self, key: slice) -> list[NDArray[Any]]: ...

    def __getitem__(self, key: int | slice) -> NDArray[Any] | list[NDArray[Any]]:
        if isinstance(key, slice):
            return [self[number] for number in range(*key.indices(len(self)))]
        number = key + len(self) if key < 0 else key
        if not 0 <= number < len(self):
            raise IndexError(f"{self.path}: document {key} of {len(self)}")
        start = int(self.doc_start[number])
        return self.tokens(start, start + int(self.doc_length[number]))

    def __iter__(self) -> Iterator[NDArray[Any]]:
        for number in range(len(self)):
            yield self[number]

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """The ids at positions ``start`` to ``stop`` of the row of all tokens.

        Positions run over gaps too; `doc_start` says where a document begins. A read inside one
        inner chunk is a view, any other one copy.

        Returns:
            [stop - start] ids, read-only.
        """
        if not 0 <= start <= stop <= self._length:
            raise IndexError(f"{self.path}: can't read {start} to {stop} of {self._length} tokens")
        pieces = []
        number = max(bisect_right(self._bases, start) - 1, 0)
        while start < stop:
            source, base = self._parts[number].tokens, self._bases[number]
            end = min(stop, base + source.length)
            if end > start:
                pieces.append(source.read(start - base, end - base))
                start = end
            number += 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, self.dtype)

    @property
    def is_encrypted(self) -> bool:
        """Whether the files are encrypted."""
        return self._key is not None

    @property
    def num_positions(self) -> int:
        """Length of the row of all tokens, gaps included."""
        return self._length

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the ids, as stored."""
        return self._parts[0].tokens.dtype

    @property
    def vocab_size(self) -> int:
        """The true vocabulary."""
        return self.manifest.vocab_size

    @property
    def eod_id(self) -> int | None:
        """The end-of-document id, if documents carry one."""
        return self.manifest.eod_id

    @cached_property
    def _bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        starts, lengths = [], []
        for part, base in zip(self._parts, self._bases, strict=True):
            start, length = part.bounds()
            starts.append(start + base if base else start)
            lengths.append(length)
        if len(starts) == 1:
            return starts[0], lengths[0]
        return np.concatenate(starts), np.concatenate(lengths)

    @property
    def doc_start(self) -> NDArray[np.int64]:
        """[documents] position of each document's first token."""
        return self._bounds[0]

    @property
    def doc_length(self) -> NDArray[np.int64]:
        """[documents] tokens of each document."""
        return self._bounds[1]

    @property
    def has_sentences(self) -> bool:
        """Whether the lengths of sentences were kept."""
        return self.manifest.counts.sentences is not None

    @cached_property
    def sentence_length(self) -> NDArray[np.int32]:
        """[sentences] tokens of each sentence, in document order."""
        self._need_sentences()
        return np.concatenate([part.sentence_length() for part in self._parts])

    @cached_property
    def doc_sentences(self) -> NDArray[np.int32]:
        """[documents] sentences of each document."""
        self._need_sentences()
        return np.concatenate([part.document_array("doc_sentences") for part in self._parts])

    def _need_sentences(self) -> None:
        if not self.has_sentences:
            raise StoreError(f"{self.path}: keeps no sentences; preprocess with --split-sentences")

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the values that documents carry."""
        names = [
            {
                path.split("/")[1]
                for path in part.manifest.files
                if path.startswith("columns/")
                and path.endswith("/zarr.json")
                and path.count("/") == 2
            }
            for part in self._parts
        ]
        return tuple(sorted(set.intersection(*names))) if names else ()

    def column(self, name: str) -> NDArray[Any]:
        """[documents] the values of one column."""
        if name not in self.columns:
            raise KeyError(f"{self.path}: has no column {name!r}; it has {list(self.columns)}")
        return np.concatenate([part.document_array(f"columns/{name}") for part in self._parts])

    @property
    def parts(self) -> tuple[Part, ...]:
        """The folders that hold arrays: one, or the segments of a merged store."""
        return self._parts

    def close(self) -> None:
        """Let the files go; arrays that were handed out stay valid."""
        for part in self._parts:
            part.tokens.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self.path), self.manifest.uuid, self.manifest.revision, self._key)

    def __repr__(self) -> str:
        counts = self.manifest.counts
        held = f"{counts.documents} documents, {counts.tokens} tokens"
        return f"<{type(self).__name__} {self.path}: {held}>"


def open_store(
    path: str | os.PathLike[str], *, key: KeySource | None = None, expect: str | None = None
) -> TokenStore:
    """Open a token store, or a Megatron ``.bin``/``.idx`` pair by its prefix.

    Only metadata is read here; shards are mapped when they are touched. A URL such as
    ``s3://bucket/store`` is opened by `mds_data.store.remote.open_remote_store`, which has options.

    Args:
        path: The store's folder, prefix or URL.
        key: Where the key of an encrypted store comes from; a plain one needs none.
        expect: SHA-256 that the (plain) manifest must have, so that an older state of the store
            that somebody put back is refused.

    Raises:
        FileNotFoundError: There is nothing at ``path``.
        SealedError: The store is encrypted and ``key`` does not open it, or ``expect`` differs.
        StoreError: The folder is no store, or one that can't be trusted.
        IndexedDatasetError: The pair is damaged.
    """
    if isinstance(path, str) and "://" in path:
        from mds_data.store.remote import open_remote_store

        if key is not None or expect is not None:
            raise StoreError(
                f"{path}: a key or an expected digest needs a store in a folder; copy it there"
            )
        return open_remote_store(path)
    root = Path(path)
    if not root.is_dir() and pair_prefix(root) is not None:
        if expect is not None:
            raise StoreError(f"{root}: a pair has no manifest whose digest could be expected")
        pair = read_indexed_dataset(root)
        return TokenStore(pair.root, pair.manifest, [pair])
    if key is not None and is_sealed(root):
        return _open_sealed(root, key, expect=expect)
    before = b""
    for attempt in range(_ATTEMPTS):
        manifest, data = read_manifest(root)
        check_expected(root, data, expect)
        try:
            return TokenStore(root, manifest, list(store_parts(root, manifest)))
        except DamagedError:
            # A writer may have put another revision in force, or be moving files to their names.
            if data == before and attempt >= 3:
                raise
            before = data
    raise StoreError(f"{root}: keeps changing while it is opened; open it when its writer is done")


def _open_sealed(root: Path, key: KeySource, *, expect: str | None) -> TokenStore:
    for _ in range(_ATTEMPTS):
        envelope = read_manifest_bytes(root)
        try:
            folder = SealedFolder(root, key, expect=expect)
        except DamagedError:
            if read_manifest_bytes(root) == envelope:  # else its keys are being changed
                raise
        else:
            part = StorePart(root, folder.manifest, folder)
            return TokenStore(root, folder.manifest, [part], key=key)
    raise StoreError(f"{root}: keeps changing while it is opened; open it when its writer is done")


def check_expected(root: Path, data: bytes, expect: str | None) -> None:
    """Raise SealedError if the bytes of a manifest have not the digest that is expected."""
    found = hashlib.sha256(data).hexdigest()
    if expect is not None and found != expect.lower():
        raise SealedError(
            str(root),
            f"has the manifest {found[:16]}..., and {expect[:16]}... was expected",
            remedy="restore the right one from a copy",
        )


def store_parts(root: Path, manifest: Manifest, *, depth: int = 0) -> Iterator[StorePart]:
    """The folder of an ordinary store, or the folders of a merged one's segments in order."""
    if not manifest.segments:
        yield StorePart(root, manifest)
        return
    if depth == _DEEPEST:
        raise StoreError(f"{root}: segments lie more than {_DEEPEST} deep; merge the stores anew")
    StoreFolder(root, manifest)  # the merged store's own files must be whole too
    for segment in manifest.segments:
        found = checked_segment(root, segment, parent=manifest)
        yield from store_parts(root / segment.path, found, depth=depth + 1)


def checked_segment(parent_root: Path, segment: Segment, *, parent: Manifest) -> Manifest:
    """The manifest of a segment, which must be the very one that was merged."""
    root = parent_root / segment.path
    if any(
        folder.is_symlink() for folder in (root, *list(root.parents)[: segment.path.count("/")])
    ):
        raise DamagedError(f"{root}: is a link; a store holds plain files only")
    if not is_store(root):
        raise DamagedError(f"{root}: the segment is missing; restore it from a copy")
    manifest, data = read_manifest(root)
    if hashlib.sha256(data).hexdigest() != segment.manifest_sha256:
        raise DamagedError(
            f"{root}: is not the segment that was merged (uuid {segment.uuid}, "
            f"revision {segment.revision}); restore it from a copy"
        )
    if manifest.dtype != parent.dtype:
        raise DamagedError(f"{root}: has {manifest.dtype} tokens in a store of {parent.dtype}")
    return manifest


def _reopen(path: str, uuid: str, revision: int, key: KeySource | None) -> TokenStore:
    store = open_store(path, key=key)
    if (store.manifest.uuid, store.manifest.revision) != (uuid, revision):
        raise StoreError(f"{path}: was replaced or changed since it was opened elsewhere")
    return store
