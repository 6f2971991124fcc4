"""Bring Megatron's .bin/.idx pairs into stores and back, and mend the --append-eod fault."""

import logging
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mds_data.errors import IndexedDatasetError, StoreError
from mds_data.store.commit import FileOperations, OutputFile, check_free_name, make_folders
from mds_data.store.indexed_dataset import (
    IndexedDataset,
    dtype_code,
    find_append_eod_fault,
    read_indexed_dataset,
    repaired_documents,
)
from mds_data.store.records import Layout, Manifest
from mds_data.store.token_store import TokenStore, open_store
from mds_data.store.writer import StoreWriter

__all__ = ["export_megatron", "import_megatron", "repair_append_eod"]

logger = logging.getLogger(__name__)

_BLOCK = 2**20


def import_megatron(
    prefix: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    eod_id: int | None = None,
    layout: Layout = "hot",
    repair: bool = False,
) -> Manifest:
    """Write the documents of a pair as a new store.

    Args:
        prefix: The pair, by its prefix or one of its files.
        target: The new store's folder.
        vocab_size: The true vocabulary; the largest id plus one if None.
        eod_id: The end-of-document id, if documents end with one.
        layout: Layout of the store.
        repair: Mend the ``--append-eod`` fault. Without it a faulty pair is taken over as Megatron
            reads it, with a warning.

    Raises:
        IndexedDatasetError: The pair is damaged, or has no fault to repair.
    """
    pair = read_indexed_dataset(prefix)
    fault = find_append_eod_fault(pair)
    if repair and fault is None:
        raise IndexedDatasetError(
            f"{pair.root}: does not have the --append-eod fault; import it without repair"
        )
    if fault is not None and not repair:
        logger.warning(
            "%s: has the --append-eod fault of Megatron-DeepSpeed: all but the first of its %d "
            "documents are read shifted; repair=True (mds-data repair) mends it",
            pair.root,
            fault.documents,
        )
    if fault is None and (unknown := pair.tokens.length - int(pair.sizes.sum())):
        logger.warning(
            "%s.bin: holds %d tokens of %d bytes that its index does not know; is the index that "
            "of another .bin, or its type code wrong?",
            pair.root,
            unknown,
            pair.tokens.dtype.itemsize,
        )
    bounds = repaired_documents(pair) if repair else _document_bounds(pair)
    split = pair.has_sentences and not repair
    with StoreWriter(
        target,
        vocab_size=largest_id(pair) + 1 if vocab_size is None else vocab_size,
        eod_id=fault.eod_id if repair and fault is not None else eod_id,
        layout=layout,
        sentences=split,
        provenance={"transforms": [_transform(pair, repaired=repair, vocab_size=vocab_size)]},
    ) as writer:
        for number, (start, stop) in enumerate(bounds):
            first, last = (int(border) for border in pair.documents[number : number + 2])
            lengths = pair.sizes[first:last].tolist() if split else None
            writer.add(pair.tokens.read(start, stop), sentence_lengths=lengths)
        return writer.commit()


def repair_append_eod(
    prefix: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    layout: Layout = "hot",
) -> Manifest:
    """Write the true documents of a pair with the ``--append-eod`` fault as a new store."""
    return import_megatron(prefix, target, vocab_size=vocab_size, layout=layout, repair=True)


def _document_bounds(pair: IndexedDataset) -> list[tuple[int, int]]:
    starts, lengths = pair.bounds()
    return list(zip(starts.tolist(), (starts + lengths).tolist(), strict=True))


def largest_id(pair: IndexedDataset) -> int:
    """The largest token of a pair, or 0."""
    blocks = range(0, pair.tokens.length, _BLOCK)
    ends = (min(start + _BLOCK, pair.tokens.length) for start in blocks)
    largest = (int(pair.tokens.read(s, e).max()) for s, e in zip(blocks, ends, strict=True))
    return max(largest, default=0)


def has_guessed_vocabulary(manifest: Manifest) -> bool:
    """Whether a store is an imported pair of which nobody said how large its vocabulary is."""
    provenance = manifest.provenance
    transforms = provenance.get("transforms") if isinstance(provenance, Mapping) else None
    first = transforms[0] if isinstance(transforms, list) and transforms else None
    if not isinstance(first, dict) or first.get("name") != "import":
        return False
    arguments = first.get("arguments")
    return isinstance(arguments, dict) and arguments.get("vocab_size") is None


def _transform(
    pair: IndexedDataset, *, repaired: bool, vocab_size: int | None
) -> dict[str, object]:
    return {
        "name": "import",
        "arguments": {"source": pair.root.name, "repair": repaired, "vocab_size": vocab_size},
        "report": {"documents": pair.num_documents, "sequences": len(pair.sizes)},
    }


def export_megatron(
    store: TokenStore | str | os.PathLike[str], prefix: str | os.PathLike[str]
) -> None:
    """Write a store as a pair that the original reads: ``PREFIX.bin`` and ``PREFIX.idx``.

    Erased documents become empty sequences, so that numbers stay. The .idx file appears last.

    Raises:
        StoreError: One of the two files exists, or would lie inside a store.
    """
    source = store if isinstance(store, TokenStore) else open_store(store)
    names = [Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx")]
    for name in names:
        check_free_name(name)
    operations = FileOperations()
    make_folders(names[0].parent, operations=operations)
    waiting = [name.with_name(f"{name.name}.partial-{os.getpid()}") for name in names]
    try:
        _write_bin(source, waiting[0], operations=operations)
        _write_idx(source, waiting[1], operations=operations)
        for partial, name in zip(waiting, names, strict=True):
            operations.rename(partial, name)
        operations.sync_folder(names[0].parent)
    finally:
        for partial in waiting:
            partial.unlink(missing_ok=True)


def _write_bin(source: TokenStore, path: Path, *, operations: FileOperations) -> None:
    output = OutputFile(path, operations=operations)
    try:
        for start, length in zip(
            source.doc_start.tolist(), source.doc_length.tolist(), strict=True
        ):
            for position in range(start, start + length, _BLOCK):
                ids = source.tokens(position, min(position + _BLOCK, start + length))
                output.write(np.ascontiguousarray(ids).data if len(ids) else b"")
        output.close()
    finally:
        output.abandon()


def _write_idx(source: TokenStore, path: Path, *, operations: FileOperations) -> None:
    sizes = source.doc_length
    borders = np.arange(len(source) + 1, dtype="<i8")
    if source.has_sentences:
        sizes = source.sentence_length.astype(np.int64)
        borders = np.concatenate([[0], np.cumsum(source.doc_sentences)]).astype("<i8")
    if len(sizes) and int(sizes.max()) > 2**31 - 1:
        raise StoreError(f"{source.path}: a document has more tokens than an .idx file can say")
    pointers = (np.cumsum(sizes) - sizes) * source.dtype.itemsize
    header = struct.pack("<QBQQ", 1, dtype_code(source.dtype), len(sizes), len(borders))
    output = OutputFile(path, operations=operations)
    try:
        output.write(b"MMIDIDX\x00\x00" + header)
        for array, dtype in ((sizes, "<i4"), (pointers, "<i8"), (borders, "<i8")):
            output.write(array.astype(dtype).tobytes())
        output.close()
    finally:
        output.abandon()
