"""Write token stores: documents stream in, shards stream out, and a commit makes them one store.

Memory is one inner chunk an array, however large the corpus. Nothing has the store's name before it
is whole and on the disk.
"""

import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mds_data.store.array_metadata import ArrayLayout, layout_for_documents, layout_for_tokens
from mds_data.store.array_writer import Place, ShardedArrayWriter
from mds_data.store.commit import FileOperations, PartialFolder, check_free_name, put_file, sweep
from mds_data.store.document_writer import DocumentWriter
from mds_data.store.lock import StoreLock
from mds_data.store.schema import (
    Counts,
    Erasure,
    FileRecord,
    Layout,
    Manifest,
    TokenizerRecord,
    check_relative_path,
    token_dtype,
)
from mds_data.store.split import split_ranges

__all__ = ["StoreWriter", "TokenizerFile", "write_store"]

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


class StoreWriter(DocumentWriter):
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
        chunk_tokens: Tokens of an inner chunk; the layout's usual size if None.
        chunks_per_shard: Inner chunks of a shard; the layout's usual number if None.
        operations: Where file operations go.

    Raises:
        StoreError: ``path`` exists, or lies inside another store.
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
        chunk_tokens: int | None = None,
        chunks_per_shard: int | None = None,
        operations: FileOperations | None = None,
    ) -> None:
        self._path = Path(path)
        _check_vocabulary(vocab_size, eod_id)
        self._eod_id = eod_id
        self._layout: Layout = _checked_layout(layout)
        self._split = split_ranges(split)
        self._tokenizer = tokenizer
        self._provenance = dict(provenance or {})
        self._dtype = token_dtype(vocab_size)
        self._stack = ExitStack()
        check_free_name(self._path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(StoreLock(self._path))
            sweep(self._path)
            self._partial = PartialFolder(self._path, operations=operations or FileOperations())
            stack.callback(self._partial.discard)
            arrays = new_arrays(
                self._partial,
                tokens=layout_for_tokens(
                    self._layout,
                    dtype=self._dtype,
                    chunk=chunk_tokens,
                    chunks_per_shard=chunks_per_shard,
                ),
                columns=columns or {},
                sentences=sentences,
            )
            super().__init__(arrays, vocab_size=vocab_size)
            stack.callback(self._abandon)
            self._stack = stack.pop_all()

    def commit(
        self,
        *,
        provenance: Mapping[str, Any] | None = None,
        erasures: tuple[Erasure, ...] = (),
    ) -> Manifest:
        """Bring everything to the disk and give the store its name.

        Args:
            provenance: Replaces what the constructor was given, for facts known only at the end.
            erasures: Records of documents that were erased where the documents come from.
        """
        files: dict[str, FileRecord] = {}
        for array in self._arrays.values():
            files |= array.close()
        files |= put_groups(self._partial, columns=bool(self._columns))
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
            erasures=erasures,
            provenance=self._provenance if provenance is None else dict(provenance),
        )
        self._partial.publish(manifest)
        self.close()
        return manifest

    def _put_tokenizer(self, files: dict[str, FileRecord]) -> TokenizerRecord | None:
        if self._tokenizer is None:
            return None
        given = self._tokenizer
        path = self._partial.file(check_relative_path(given.file, name="tokenizer"))
        record = put_file(path, given.content, operations=self._partial.operations)
        files[given.file] = record
        return TokenizerRecord(
            kind=given.kind, file=given.file, sha256=record.sha256, name=given.name
        )

    def close(self) -> None:
        """Remove what was not committed, and free the lock."""
        self._stack.close()

    def _abandon(self) -> None:
        for array in self._arrays.values():
            array.abandon()

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


def put_groups(place: Place, *, columns: bool) -> dict[str, FileRecord]:
    """The zarr.json of the store's group, and of the group of columns."""
    names = ["zarr.json", "columns/zarr.json"] if columns else ["zarr.json"]
    return {name: put_file(place.file(name), _GROUP, operations=place.operations) for name in names}


def new_arrays(
    place: Place,
    *,
    tokens: ArrayLayout,
    columns: Mapping[str, np.dtype[Any] | str],
    sentences: bool,
) -> dict[str, ShardedArrayWriter]:
    """Writers for all arrays of a store."""
    documents: dict[str, np.dtype[Any]] = {"doc_start": _INT64, "doc_length": _INT64}
    if sentences:
        documents["doc_sentences"] = _INT32
    for name, dtype in columns.items():
        if "/" in check_relative_path(name, name="column"):
            raise ValueError(f"the column name {name!r} must not hold a /")
        documents[f"columns/{name}"] = np.dtype(dtype).newbyteorder("<")
    arrays = {"tokens": ShardedArrayWriter(place, "tokens", layout=tokens, dimension="token")}
    for name, kind in documents.items():
        layout = layout_for_documents(kind)
        arrays[name] = ShardedArrayWriter(place, name, layout=layout, dimension="document")
    if sentences:
        layout = layout_for_documents(_INT32)
        arrays["sentence_length"] = ShardedArrayWriter(
            place, "sentence_length", layout=layout, dimension="sentence"
        )
    return arrays


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


def _check_vocabulary(vocab_size: int, eod_id: int | None) -> None:
    if not 1 <= vocab_size < 2**31:
        raise ValueError(f"vocab_size ({vocab_size}) must lie from 1 to 2**31 - 1")
    if eod_id is not None and not 0 <= eod_id < vocab_size:
        raise ValueError(f"eod_id ({eod_id}) must be smaller than vocab_size ({vocab_size})")


def _checked_layout(layout: Layout) -> Layout:
    if layout not in ("hot", "archive"):
        raise ValueError(f"layout must be 'hot' or 'archive', not {layout!r}")
    return layout
