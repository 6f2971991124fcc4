"""Write token stores: documents stream in, shards stream out, and a commit makes them one store.

Memory is one inner chunk an array, however large the corpus. Nothing has the store's name before it
is whole and on the disk.
"""

import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mds_data.commit import FileOperations, OutputFile, PartialFolder, put_file, sweep
from mds_data.errors import StoreError
from mds_data.lock import StoreLock
from mds_data.schema import (
    Counts,
    FileRecord,
    Layout,
    Manifest,
    TokenizerRecord,
    token_dtype,
)
from mds_data.shard import (
    ABSENT,
    ArrayLayout,
    encode_chunk,
    encode_index,
    layout_for_documents,
    layout_for_tokens,
    metadata_json,
)
from mds_data.split import split_ranges

__all__ = ["ShardedArrayWriter", "StoreWriter", "TokenizerFile", "write_store"]

_GROUP = b'{\n  "zarr_format": 3,\n  "node_type": "group",\n  "attributes": {}\n}\n'
_INT64 = np.dtype("<i8")
_INT32 = np.dtype("<i4")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFile:
    """A tokenizer to be kept inside the store."""

    kind: str
    """For example ``HFTokenizer``."""
    content: bytes
    file: str = "tokenizer.json"
    name: str | None = None


class ShardedArrayWriter:
    """Stream one 1-D array into shard files, one inner chunk in memory.

    Args:
        partial: The folder of the store that is being written.
        name: The array's path inside it.
        layout: Sizes and codec; its length is ignored.
        dimension: Name of the array's one dimension.
    """

    def __init__(
        self,
        partial: PartialFolder,
        name: str,
        *,
        layout: ArrayLayout,
        dimension: str,
    ) -> None:
        self.length = 0
        self.files: dict[str, FileRecord] = {}
        self._partial = partial
        self._name = name
        self._layout = layout
        self._dimension = dimension
        self._buffer = np.zeros(layout.chunk, layout.dtype)
        self._filled = 0
        self._output: OutputFile | None = None
        self._index = np.full((layout.chunks_per_shard, 2), ABSENT, np.uint64)
        self._chunks = 0
        self._shards = 0
        partial.folder(name)

    def append(self, values: NDArray[Any]) -> None:
        """Add elements at the end."""
        self.length += len(values)
        chunk = self._layout.chunk
        if self._filled + len(values) < chunk:  # the common case: a document inside a chunk
            self._buffer[self._filled : self._filled + len(values)] = values
            self._filled += len(values)
            return
        start = chunk - self._filled if self._filled else 0
        if start:
            self._buffer[self._filled :] = values[:start]
            self._put_chunk(self._buffer)
        whole = start + (len(values) - start) // chunk * chunk
        for position in range(start, whole, chunk):
            self._put_chunk(values[position : position + chunk])
        self._filled = len(values) - whole
        self._buffer[: self._filled] = values[whole:]

    def close(self) -> dict[str, FileRecord]:
        """Write what is left and zarr.json; the records of all files of the array."""
        if self._filled:
            self._put_chunk(self._buffer[: self._filled])
            self._filled = 0
        self._close_shard()
        layout = replace(self._layout, length=self.length)
        path = f"{self._name}/zarr.json"
        self.files[path] = put_file(
            self._partial.path / path,
            metadata_json(layout, dimension=self._dimension),
            operations=self._partial.operations,
        )
        return self.files

    def abandon(self) -> None:
        """Close the open shard as it is."""
        if self._output is not None:
            self._output.abandon()

    def _put_chunk(self, values: NDArray[Any]) -> None:
        if self._output is None:
            folder = self._partial.folder(f"{self._name}/c")
            path = folder / str(self._shards)
            self._output = OutputFile(path, operations=self._partial.operations)
        data = encode_chunk(values, layout=self._layout)
        self._index[self._chunks] = self._output.size, len(data)
        self._output.write(data)
        self._chunks += 1
        if self._chunks == self._layout.chunks_per_shard:
            self._close_shard()

    def _close_shard(self) -> None:
        if self._output is None:
            return
        self._output.write(encode_index(self._index))
        self.files[f"{self._name}/c/{self._shards}"] = self._output.close()
        self._output = None
        self._index[:] = ABSENT
        self._chunks = 0
        self._shards += 1


class StoreWriter:
    """Write a new store document by document; `commit` makes it appear whole.

    Use it as a context manager. Leaving the block without `commit` removes what was written.

    Args:
        path: The store's folder; it must not exist yet.
        vocab_size: The true vocabulary; every id must be smaller.
        eod_id: The end-of-document id that documents end with, if any. It is recorded, not added.
        layout: ``"hot"`` for training, ``"archive"`` for keeping.
        split: Megatron's split string such as ``"969,30,1"``, or ranges by name.
        tokenizer: A tokenizer to keep inside the store.
        provenance: Inputs and transforms, as the format describes.
        columns: Name and dtype of values that each document carries.
        sentences: Whether documents come with the lengths of their sentences.
        operations: Where file operations go.

    Raises:
        StoreError: ``path`` exists.
        LockedError: Another writer is at work on ``path``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        vocab_size: int,
        eod_id: int | None = None,
        layout: Layout = "hot",
        split: str | Mapping[str, tuple[float, float]] | None = None,
        tokenizer: TokenizerFile | None = None,
        provenance: Mapping[str, Any] | None = None,
        columns: Mapping[str, np.dtype[Any] | str] | None = None,
        sentences: bool = False,
        operations: FileOperations | None = None,
    ) -> None:
        self._path = Path(path)
        self._vocab_size = _checked_vocabulary(vocab_size, eod_id)
        self._eod_id = eod_id
        self._layout: Layout = _checked_layout(layout)
        self._split = split_ranges(split)
        self._tokenizer = tokenizer
        self._provenance = dict(provenance or {})
        self._tokens = 0
        self._stack = ExitStack()
        if os.path.lexists(self._path):
            raise StoreError(f"{self._path}: exists; choose another name or remove it first")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(StoreLock(self._path))
            sweep(self._path)
            self._partial = PartialFolder(self._path, operations=operations or FileOperations())
            stack.callback(self._discard)
            self._open_arrays(columns or {}, sentences=sentences)
            self._stack = stack.pop_all()

    def _open_arrays(self, columns: Mapping[str, Any], *, sentences: bool) -> None:
        self._dtype = token_dtype(self._vocab_size)
        documents: dict[str, np.dtype[Any]] = {"doc_start": _INT64, "doc_length": _INT64}
        if sentences:
            documents["doc_sentences"] = _INT32
        documents |= {f"columns/{name}": np.dtype(dtype) for name, dtype in columns.items()}
        self._arrays = {
            "tokens": ShardedArrayWriter(
                self._partial,
                "tokens",
                layout=layout_for_tokens(self._layout, dtype=self._dtype),
                dimension="token",
            )
        }
        for name, dtype in documents.items():
            self._arrays[name] = self._small_array(name, dtype, dimension="document")
        if sentences:
            self._arrays["sentence_length"] = self._small_array(
                "sentence_length", _INT32, dimension="sentence"
            )
        self._columns = frozenset(columns)
        self._sentences = sentences

    def _small_array(
        self, name: str, dtype: np.dtype[Any], *, dimension: str
    ) -> ShardedArrayWriter:
        layout = layout_for_documents(dtype.newbyteorder("<"))
        return ShardedArrayWriter(self._partial, name, layout=layout, dimension=dimension)

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return self._arrays["doc_length"].length

    @property
    def num_tokens(self) -> int:
        """Tokens added so far."""
        return self._tokens

    def add(
        self,
        tokens: ArrayLike,
        *,
        sentence_lengths: Sequence[int] | None = None,
        columns: Mapping[str, Any] | None = None,
    ) -> None:
        """Add one document.

        Args:
            tokens: [tokens] ids, the end-of-document id included where the store has one.
            sentence_lengths: Tokens of each sentence; needed if the store keeps sentences.
            columns: The document's value in each column.
        """
        ids = np.asarray(tokens)
        self.add_many(
            ids,
            lengths=np.array([len(ids)], np.int64),
            sentence_lengths=sentence_lengths,
            doc_sentences=None if sentence_lengths is None else [len(sentence_lengths)],
            columns={name: [value] for name, value in (columns or {}).items()},
        )

    def add_many(
        self,
        tokens: ArrayLike,
        *,
        lengths: ArrayLike,
        sentence_lengths: ArrayLike | None = None,
        doc_sentences: ArrayLike | None = None,
        columns: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        """Add many documents at once.

        Args:
            tokens: [sum of lengths] ids of all documents, one after the other.
            lengths: [documents] tokens of each document.
            sentence_lengths: [sentences] tokens of each sentence, in document order.
            doc_sentences: [documents] sentences of each document.
            columns: [documents] values by column.
        """
        ids = _checked_ids(tokens, self._vocab_size, first=self.num_documents)
        counts = np.asarray(lengths, np.int64).reshape(-1)
        if (counts < 0).any() or counts.sum() != len(ids):
            raise ValueError(f"lengths must be positive and add up to the {len(ids)} tokens given")
        self._check_extras(len(counts), columns or {}, sentence_lengths, doc_sentences)
        starts = self._arrays["tokens"].length + np.cumsum(counts) - counts
        self._arrays["tokens"].append(ids)
        self._arrays["doc_start"].append(starts)
        self._arrays["doc_length"].append(counts)
        for name, values in (columns or {}).items():
            self._arrays[f"columns/{name}"].append(np.asarray(values))
        if sentence_lengths is not None and doc_sentences is not None:
            self._arrays["sentence_length"].append(np.asarray(sentence_lengths, np.int32))
            self._arrays["doc_sentences"].append(np.asarray(doc_sentences, np.int32))
        self._tokens += len(ids)

    def add_gap(self, size: int) -> None:
        """Leave ``size`` zero tokens that belong to no document."""
        self._arrays["tokens"].append(np.zeros(size, self._dtype))

    def add_erased(self) -> None:
        """Add a document of length 0 that keeps the number of one that was erased."""
        self.add(np.zeros(0, self._dtype), sentence_lengths=[] if self._sentences else None)

    def _check_extras(
        self,
        documents: int,
        columns: Mapping[str, ArrayLike],
        sentence_lengths: ArrayLike | None,
        doc_sentences: ArrayLike | None,
    ) -> None:
        if columns.keys() != self._columns:
            raise ValueError(
                f"the store's columns are {sorted(self._columns)}, but {sorted(columns)} were given"
            )
        for name, values in columns.items():
            if len(np.asarray(values)) != documents:
                raise ValueError(
                    f"column {name!r} needs one value for each of {documents} documents"
                )
        given = sentence_lengths is not None and doc_sentences is not None
        if given != self._sentences:
            raise ValueError(
                "sentence lengths must be given exactly if the store was opened with sentences=True"
            )
        if given and np.sum(np.asarray(doc_sentences)) != len(np.asarray(sentence_lengths)):
            raise ValueError("doc_sentences must add up to the number of sentence lengths")

    def commit(self, *, provenance: Mapping[str, Any] | None = None) -> Manifest:
        """Bring everything to the disk and give the store its name.

        Args:
            provenance: Replaces what the constructor was given, for facts known only at the end.
        """
        files: dict[str, FileRecord] = {}
        for array in self._arrays.values():
            files |= array.close()
        operations = self._partial.operations
        files["zarr.json"] = put_file(
            self._partial.path / "zarr.json", _GROUP, operations=operations
        )
        tokenizer = self._put_tokenizer(files)
        sentences = self._arrays["sentence_length"].length if self._sentences else None
        manifest = Manifest(
            uuid=new_uuid(files),
            created=timestamp(),
            vocab_size=self._vocab_size,
            eod_id=self._eod_id,
            dtype="uint16" if self._dtype.itemsize == 2 else "int32",
            layout=self._layout,
            counts=Counts(documents=self.num_documents, tokens=self._tokens, sentences=sentences),
            files=files,
            tokenizer=tokenizer,
            split=self._split,
            provenance=self._provenance if provenance is None else dict(provenance),
        )
        self._partial.publish(manifest)
        self.close()
        return manifest

    def _put_tokenizer(self, files: dict[str, FileRecord]) -> TokenizerRecord | None:
        if self._tokenizer is None:
            return None
        given = self._tokenizer
        path = self._partial.path / given.file
        record = put_file(path, given.content, operations=self._partial.operations)
        files[given.file] = record
        return TokenizerRecord(
            kind=given.kind, file=given.file, sha256=record.sha256, name=given.name
        )

    def close(self) -> None:
        """Remove what was not committed, and free the lock."""
        self._stack.close()

    def _discard(self) -> None:
        for array in getattr(self, "_arrays", {}).values():
            array.abandon()
        self._partial.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def write_store(
    path: str | os.PathLike[str],
    documents: Iterable[Sequence[int] | NDArray[Any]],
    *,
    vocab_size: int,
    eod_id: int | None = None,
    layout: Layout = "hot",
    split: str | Mapping[str, tuple[float, float]] | None = None,
    tokenizer: TokenizerFile | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write documents of token ids as a new store.

    Args:
        path: The store's folder; it must not exist yet.
        documents: The ids of each document, in order; an empty document keeps its number.
        vocab_size: The true vocabulary; every id must be smaller.
        eod_id: The end-of-document id that documents end with, if any. It is recorded, not added.
        layout: ``"hot"`` for training, ``"archive"`` for keeping.
        split: Megatron's split string such as ``"969,30,1"``, or ranges by name.
        tokenizer: A tokenizer to keep inside the store.
        provenance: Inputs and transforms, as the format describes.

    Returns:
        The manifest of the store.
    """
    with StoreWriter(
        path,
        vocab_size=vocab_size,
        eod_id=eod_id,
        layout=layout,
        split=split,
        tokenizer=tokenizer,
        provenance=provenance,
    ) as writer:
        for document in documents:
            writer.add(document)
        return writer.commit()


def timestamp() -> str:
    """Now, or SOURCE_DATE_EPOCH, as RFC 3339 in UTC."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    moment = datetime.fromtimestamp(int(epoch), UTC) if epoch else datetime.now(UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def new_uuid(files: Mapping[str, FileRecord]) -> str:
    """A new identity; in a reproducible build (SOURCE_DATE_EPOCH) the content decides it."""
    if "SOURCE_DATE_EPOCH" not in os.environ:
        return str(uuid.uuid4())
    content = "\n".join(f"{path} {record.sha256}" for path, record in sorted(files.items()))
    return str(uuid.uuid5(uuid.NAMESPACE_OID, content))


def _checked_vocabulary(vocab_size: int, eod_id: int | None) -> int:
    if not 1 <= vocab_size < 2**31:
        raise ValueError(f"vocab_size ({vocab_size}) must lie from 1 to 2**31 - 1")
    if eod_id is not None and not 0 <= eod_id < vocab_size:
        raise ValueError(f"eod_id ({eod_id}) must be smaller than vocab_size ({vocab_size})")
    return vocab_size


def _checked_layout(layout: Layout) -> Layout:
    if layout not in ("hot", "archive"):
        raise ValueError(f"layout must be 'hot' or 'archive', not {layout!r}")
    return layout


def _checked_ids(tokens: ArrayLike, vocab_size: int, *, first: int) -> NDArray[Any]:
    ids = np.asarray(tokens)
    if ids.size == 0:
        return np.zeros(0, token_dtype(vocab_size))
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"document {first}: tokens must be a row of whole numbers, not {ids.ndim}-d {ids.dtype}"
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        wrong = high if high >= vocab_size else low
        raise ValueError(
            f"documents from number {first} on hold the token {wrong}, outside the vocabulary of "
            f"{vocab_size}; give the tokenizer's true vocab_size"
        )
    return ids
