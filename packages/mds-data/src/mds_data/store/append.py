"""Add documents at the end of a store; until the commit it stays what it was."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from mds_data.store.any_change import ArrayFiles, begin_change
from mds_data.store.array_writer import ShardedArrayWriter
from mds_data.store.columns import attributes_in
from mds_data.store.commit import FileOperations
from mds_data.store.document_writer import DocumentWriter
from mds_data.store.records import FileRecord, Manifest
from mds_data.store.remote_array import RemoteOptions

__all__ = ["StoreAppender", "append_documents"]


class StoreAppender(DocumentWriter):
    """Add documents to an existing store; `commit` makes them part of it.

    The last, unfinished shard of each array is written anew with the new documents after it; all
    other shards stay untouched. Use it as a context manager.

    Args:
        path: The store's folder, a URL such as ``s3://bucket/store``, or a zarr store.
        operations: Where file operations go, in a folder.
        options: Keys, endpoint and retries, behind a network.
    """

    def __init__(
        self,
        path: Any,
        *,
        operations: FileOperations | None = None,
        options: RemoteOptions | None = None,
    ) -> None:
        with ExitStack() as stack:
            change = begin_change(path, operations=operations, options=options)
            stack.enter_context(change)
            self._change = change
            arrays: dict[str, ShardedArrayWriter] = {}
            stack.callback(_abandon, arrays)
            names = [name[: -len("/zarr.json")] for name in self._change.manifest.files]
            for name in names:
                if f"{name}/zarr.json" in self._change.manifest.files and name != "columns":
                    arrays[name] = _continued(self._change, name)
            super().__init__(arrays, vocab_size=self._change.manifest.vocab_size)
            self._before = self.num_documents
            self._stack = stack.pop_all()

    def commit(self) -> Manifest:
        """Put the store with the added documents in force."""
        manifest = self._change.manifest
        if self.num_documents == self._before:
            return manifest
        files: dict[str, FileRecord] = dict(manifest.files)
        for array in self._arrays.values():
            files |= array.close()
        sentences = self._arrays["sentence_length"].length if self._sentences else None
        counts = replace(
            manifest.counts,
            documents=self.num_documents,
            tokens=manifest.counts.tokens + self.num_tokens,
            sentences=sentences,
        )
        changed = replace(manifest, revision=self._change.revision, counts=counts, files=files)
        return self._change.commit(changed)

    def close(self) -> None:
        """Remove what was not committed, and free the lock."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _continued(change: ArrayFiles, name: str) -> ShardedArrayWriter:
    """A writer that goes on after an array's last element."""
    array = change.array(name)
    layout = array.layout
    first_shard = array.length // layout.shard
    dimension = {"tokens": "token", "sentence_length": "sentence"}.get(name, "document")
    metadata = f"{name}/zarr.json"
    writer = ShardedArrayWriter(
        change,
        name,
        layout=layout,
        dimension=dimension,
        first_shard=first_shard,
        attributes=attributes_in(change.read_file(metadata), name=metadata),
    )
    for start in range(first_shard * layout.shard, array.length, layout.chunk):
        writer.append(array.read(start, min(start + layout.chunk, array.length)))
    array.close()
    return writer


def _abandon(arrays: dict[str, ShardedArrayWriter]) -> None:
    for array in arrays.values():
        array.abandon()


def append_documents(
    path: Any,
    documents: Iterable[Sequence[int] | NDArray[Any]],
    *,
    options: RemoteOptions | None = None,
) -> Manifest:
    """Add documents of token ids to a store.

    Args:
        path: The store's folder, a URL such as ``s3://bucket/store``, or a zarr store.
        documents: The ids of each document, in order.
        options: Keys, endpoint and retries, behind a network.

    Returns:
        The manifest of the new revision.
    """
    with StoreAppender(path, options=options) as appender:
        for document in documents:
            appender.add(document)
        return appender.commit()
