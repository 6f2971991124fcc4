"""Erase documents from a store: their bytes are overwritten, their numbers stay taken.

Other stores may hold the same shards by hard link. They can't be changed from here, so they are
looked for and named.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mds_data.store.any_change import ArrayFiles, begin_change
from mds_data.store.array_writer import ShardedArrayWriter
from mds_data.store.change import StoreChange
from mds_data.store.columns import attributes_in
from mds_data.store.commit import FileOperations
from mds_data.store.folder import is_store
from mds_data.store.new_store import timestamp
from mds_data.store.reader import ShardedArray
from mds_data.store.records import Erasure, FileRecord, Manifest
from mds_data.store.remote import RemotePart
from mds_data.store.remote_array import RemoteArray, RemoteOptions
from mds_data.store.remote_change import RemoteChange
from mds_data.store.token_store import StorePart

__all__ = ["ErasureReport", "erase_documents"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ErasureReport:
    """What was erased, and where copies may be left."""

    documents: tuple[int, ...]
    """Numbers of the documents that held tokens until now."""
    tokens: int
    revision: int
    linked_files: tuple[str, ...]
    """Files of the store whose old content other folders still hold by hard link."""
    linked_stores: tuple[str, ...]
    """Stores, among those searched, that hold it; erase the documents there too."""


def erase_documents(
    store: Any,
    documents: Iterable[int],
    *,
    reason: str,
    search: Sequence[str | os.PathLike[str]] | None = None,
    operations: FileOperations | None = None,
    options: RemoteOptions | None = None,
) -> ErasureReport:
    """Overwrite documents with zeros, everywhere in the store, and keep a record.

    Object storage that keeps old versions of objects has the documents in those still.

    Args:
        store: The store's folder, a URL such as ``s3://bucket/store``, or a zarr store.
        documents: Numbers of the documents; they become empty, and no other number changes.
        reason: Why, for the record; never the content.
        search: Folders to look through for stores that share files; the store's parent if None.
        operations: Where file operations go, in a folder.
        options: Keys, endpoint and retries, behind a network.

    Raises:
        IndexError: There is no such document.
    """
    with begin_change(store, operations=operations, options=options) as change:
        numbers = _filled(documents, change)
        record = Erasure(
            documents=tuple(numbers.tolist()),
            when=timestamp(),
            reason=reason,
            tokens=int(change.part.bounds()[1][numbers].sum()),
            revision=change.revision if len(numbers) else change.manifest.revision,
        )
        if not len(numbers):
            return _report(record)
        linked = change.linked_files()
        files, sentences = _write_without(numbers, change)
        replaced = {name: linked[name] for name in files if name in linked}
        stores = _linked_stores(change.root, set(replaced.values()), search)
        _commit(change, files, record, sentences=sentences)
        return _report(record, linked_files=tuple(sorted(replaced)), linked_stores=stores)


def _report(
    record: Erasure,
    *,
    linked_files: tuple[str, ...] = (),
    linked_stores: tuple[str, ...] = (),
) -> ErasureReport:
    return ErasureReport(
        documents=record.documents,
        tokens=record.tokens,
        revision=record.revision or 0,
        linked_files=linked_files,
        linked_stores=linked_stores,
    )


def _filled(documents: Iterable[int], change: StoreChange | RemoteChange) -> NDArray[np.int64]:
    """The numbers, each once, of documents that hold tokens."""
    length = change.part.bounds()[1]
    numbers = _checked_numbers(documents, len(length), change.root)
    return numbers[length[numbers] > 0]


def _write_without(
    numbers: NDArray[np.int64], change: StoreChange | RemoteChange
) -> tuple[dict[str, FileRecord], int | None]:
    """Write all files that the documents are in; their records, and how many sentences are left."""
    part = change.part
    start, length = part.bounds()
    files = _write_tokens(change, part.tokens, start[numbers], length[numbers])
    sentences = _write_document_arrays(change, part, numbers, files)
    part.tokens.close()
    return files, sentences


def _checked_numbers(documents: Iterable[int], count: int, root: Path) -> NDArray[np.int64]:
    numbers = np.unique(np.array(list(documents), np.int64))
    if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < count:
        wrong = numbers[0] if numbers[0] < 0 else numbers[-1]
        raise IndexError(f"{root}: has no document {wrong}; it holds {count}")
    return numbers


def _commit(
    change: StoreChange | RemoteChange,
    files: dict[str, FileRecord],
    record: Erasure,
    *,
    sentences: int | None,
) -> Manifest:
    manifest = change.manifest
    counts = replace(
        manifest.counts, tokens=manifest.counts.tokens - record.tokens, sentences=sentences
    )
    return change.commit(
        replace(
            manifest,
            revision=change.revision,
            counts=counts,
            files={**manifest.files, **files},
            erasures=(*manifest.erasures, record),
        )
    )


def _write_tokens(
    change: ArrayFiles,
    tokens: ShardedArray | RemoteArray,
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> dict[str, FileRecord]:
    """Write every shard that holds erased tokens anew, with zeros in their place."""
    layout = tokens.layout
    ends = starts + lengths
    shards = np.unique(
        np.concatenate(
            [
                np.arange(first, last + 1)
                for first, last in zip(
                    starts // layout.shard, (ends - 1) // layout.shard, strict=True
                )
            ]
        )
    )
    files: dict[str, FileRecord] = {}
    for shard in shards.tolist():
        writer = ShardedArrayWriter(
            change, "tokens", layout=layout, dimension="token", first_shard=shard
        )
        stop = min((shard + 1) * layout.shard, tokens.length)
        for position in range(shard * layout.shard, stop, layout.chunk):
            end = min(position + layout.chunk, stop)
            writer.append(_blanked(tokens, position, end, starts, ends))
        writer.finish_shard()
        files |= writer.files
    return files


def _blanked(
    tokens: ShardedArray | RemoteArray,
    position: int,
    end: int,
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> NDArray[Any]:
    ids = tokens.read(position, end)
    first = int(np.searchsorted(ends, position, side="right"))
    last = int(np.searchsorted(starts, end, side="left"))
    if first < last:
        ids = ids.copy()
        for start, stop in zip(starts[first:last].tolist(), ends[first:last].tolist(), strict=True):
            ids[max(start - position, 0) : stop - position] = 0
    return ids


def _write_document_arrays(
    change: ArrayFiles,
    part: StorePart | RemotePart,
    numbers: NDArray[np.int64],
    files: dict[str, FileRecord],
) -> int | None:
    """Write lengths, columns and sentences without the erased documents; the sentences left."""
    names = [
        path[: -len("/zarr.json")] for path in part.manifest.files if path.endswith("/zarr.json")
    ]
    for name in names:
        if name == "doc_length" or name == "doc_sentences" or name.startswith("columns/"):
            values = part.document_array(name).copy()
            values[numbers] = 0
            files |= _rewritten(change, name, values, dimension="document")
    if part.manifest.counts.sentences is None:
        return None
    owner = np.repeat(np.arange(part.num_documents), part.document_array("doc_sentences"))
    kept = part.sentence_length()[~np.isin(owner, numbers)]
    files |= _rewritten(change, "sentence_length", kept, dimension="sentence")
    return len(kept)


def _rewritten(
    change: ArrayFiles, name: str, values: NDArray[Any], *, dimension: str
) -> dict[str, FileRecord]:
    layout = change.array(name).layout
    metadata = f"{name}/zarr.json"
    attributes = attributes_in(change.read_file(metadata), name=metadata)
    writer = ShardedArrayWriter(
        change, name, layout=layout, dimension=dimension, attributes=attributes
    )
    writer.append(values)
    return writer.close()


def _linked_stores(
    root: Path,
    inodes: set[tuple[int, int]],
    search: Sequence[str | os.PathLike[str]] | None,
) -> tuple[str, ...]:
    """Stores below the searched folders that hold one of the files."""
    if not inodes:
        return ()
    found = set()
    for base in [root.resolve().parent] if search is None else [Path(path) for path in search]:
        for folder, _, names in os.walk(base):
            for name in names:
                path = Path(folder) / name
                status = path.lstat()
                if (status.st_dev, status.st_ino) in inodes:
                    found.add(_store_of(path))
    found.discard(root.resolve())
    return tuple(sorted(str(path) for path in found if path is not None))


def _store_of(path: Path) -> Path | None:
    for folder in path.resolve().parents:
        if is_store(folder):
            return folder
    return None
