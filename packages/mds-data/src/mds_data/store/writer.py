"""Write token stores: documents stream in, shards stream out, and a commit makes them one store.

Memory is one inner chunk an array, however large the corpus. Nothing has the store's name before it
is whole and on the disk.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mds_data.errors import StoreError
from mds_data.store.array_metadata import layout_for_tokens
from mds_data.store.commit import (
    FileOperations,
    PartialFolder,
    check_free_name,
    make_folders,
    put_file,
    sweep,
)
from mds_data.store.document_writer import DocumentWriter
from mds_data.store.lock import StoreLock
from mds_data.store.new_store import new_arrays, new_uuid, put_groups, timestamp
from mds_data.store.resume import Checkpoint, find_checkpoint, trim, write_checkpoint
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
        job: What the caller was asked to do, as JSON; a checkpoint keeps it.
        resume: Go on from the last checkpoint that a writer with the same ``job`` made; begin
            anew if there is none.

    Raises:
        StoreError: ``path`` exists, or lies inside another store; or the checkpoint is of
            another job.
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
        job: Mapping[str, Any] | None = None,
        resume: bool = False,
    ) -> None:
        if isinstance(path, str) and "://" in path:
            raise StoreError(
                f"{path}: a store is written to a folder; mds_data.store.upload.upload_store sends "
                f"it to a URL then"
            )
        self._path = Path(path)
        _check_vocabulary(vocab_size, eod_id)
        self._eod_id = eod_id
        self._layout: Layout = _checked_layout(layout)
        self._split = split_ranges(split)
        self._tokenizer = tokenizer
        self._provenance = dict(provenance or {})
        self._dtype = token_dtype(vocab_size)
        self._job = dict(job or {})
        self._stack = ExitStack()
        self._resumable = False
        check_free_name(self._path)
        disk = operations or FileOperations()
        make_folders(self._path.parent, operations=disk)
        with ExitStack() as stack:
            stack.enter_context(StoreLock(self._path))
            found = find_checkpoint(self._path) if resume else None
            checkpoint = self._take_over(found, disk)
            stack.callback(self._discard)
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
            self._restore(checkpoint)
            self._stack = stack.pop_all()

    @property
    def restored(self) -> Mapping[str, Any] | None:
        """What the caller gave to `checkpoint` when the interrupted writer made its last one."""
        return self._restored

    @property
    def resumable(self) -> bool:
        """Whether there is a checkpoint, so that leaving without `commit` keeps what it counts."""
        return self._resumable

    def checkpoint(self, state: Mapping[str, Any]) -> None:
        """Bring everything to the disk, so that a writer with ``resume`` can go on from here.

        Args:
            state: How far the caller is, as JSON; `restored` gives it back.
        """
        arrays = {name: array.save() for name, array in self._arrays.items()}
        found = Checkpoint(job=self._job, state=dict(state), tokens=self._tokens, arrays=arrays)
        write_checkpoint(self._partial, found)
        self._resumable = True

    def _take_over(
        self, found: tuple[Path, Checkpoint] | None, operations: FileOperations
    ) -> Checkpoint | None:
        """Prepare the folder to write in: the interrupted writer's, or a new one."""
        if found is None:
            sweep(self._path)
            self._partial = PartialFolder(self._path, operations=operations)
            return None
        folder, checkpoint = found
        other = [
            key
            for key in {*checkpoint.job, *self._job}
            if checkpoint.job.get(key) != self._job.get(key)
        ]
        if other:
            raise StoreError(
                f"{self._path}: the interrupted run is of another job ({', '.join(sorted(other))} "
                f"differ); give the same arguments and inputs, or start anew by --overwrite"
            )
        trim(folder, checkpoint, operations=operations)
        self._partial = PartialFolder(self._path, operations=operations, path=folder)
        return checkpoint

    def _restore(self, checkpoint: Checkpoint | None) -> None:
        self._restored = None if checkpoint is None else checkpoint.state
        if checkpoint is None:
            return
        if checkpoint.arrays.keys() != self._arrays.keys():
            raise StoreError(f"{self._path}: the interrupted run has other arrays; start anew")
        self._resumable = True
        self._tokens = checkpoint.tokens
        for name, state in checkpoint.arrays.items():
            self._arrays[name].restore(state)

    def _discard(self) -> None:
        if not self._resumable:
            self._partial.discard()

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
        self._resumable = False
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


def _check_vocabulary(vocab_size: int, eod_id: int | None) -> None:
    if not 1 <= vocab_size < 2**31:
        raise ValueError(f"vocab_size ({vocab_size}) must lie from 1 to 2**31 - 1")
    if eod_id is not None and not 0 <= eod_id < vocab_size:
        raise ValueError(f"eod_id ({eod_id}) must be smaller than vocab_size ({vocab_size})")


def _checked_layout(layout: Layout) -> Layout:
    if layout not in ("hot", "archive"):
        raise ValueError(f"layout must be 'hot' or 'archive', not {layout!r}")
    return layout
