"""Copy documents into new stores: another layout, without gaps, or split into parts."""

import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mds_data.store.columns import column_labels
from mds_data.store.commit import FileOperations
from mds_data.store.folder import StoreFolder
from mds_data.store.origins import kept_inputs
from mds_data.store.records import Layout, Manifest
from mds_data.store.remote import RemoteTokenStore
from mds_data.store.selection import document_range
from mds_data.store.split import split_ranges
from mds_data.store.token_store import StorePart, TokenStore, open_store
from mds_data.store.writer import StoreWriter, TokenizerFile

__all__ = ["copy_documents", "kept_tokenizer", "repack_store", "split_store"]

_BLOCK_TOKENS = 2**20
_PARTS = ("train", "valid", "test")


def repack_store(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    layout: Layout,
    operations: FileOperations | None = None,
) -> Manifest:
    """Write a store anew in another layout, gaps left out, segments joined.

    Documents keep their numbers, erased ones too.

    Args:
        source: The store, a URL such as ``s3://bucket/store``, or a Megatron pair.
        target: The new store's folder.
        layout: ``"hot"`` or ``"archive"``.
        operations: Where file operations go.
    """
    with open_store(source) as store:
        return _copy(
            store,
            target,
            first=0,
            stop=len(store),
            layout=layout,
            split=store.manifest.split,
            transform={"name": "repack", "arguments": {"layout": layout}},
            operations=operations,
        )


def split_store(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    split: str | None = None,
    layout: Layout | None = None,
) -> dict[str, Manifest]:
    """Write the parts of a split as stores ``TARGET/train``, ``TARGET/valid``, ``TARGET/test``.

    Args:
        source: The store, a URL such as ``s3://bucket/store``, or a Megatron pair.
        target: The folder of the new stores.
        split: Megatron's split string; the split that the source keeps if None.
        layout: Layout of the parts; the source's if None.

    Returns:
        The manifest of each part; a part without documents is left out.
    """
    with open_store(source) as store:
        if split is None and store.manifest.split is None:
            raise ValueError(f"{source}: keeps no split; give the shares, such as '969,30,1'")
        names = _PARTS if split is not None else tuple(store.manifest.split or ())
        split_ranges(split)
        written = {}
        for name in names:
            chosen = name if split is None else (split, name)
            first, stop = document_range(store, chosen)
            if first == stop:
                continue
            written[name] = _copy(
                store,
                Path(target) / name,
                first=first,
                stop=stop,
                layout=layout or store.manifest.layout,
                split=None,
                transform={"name": "split", "arguments": {"part": name, "split": split}},
            )
        return written


def _copy(
    store: TokenStore,
    target: str | os.PathLike[str],
    *,
    first: int,
    stop: int,
    layout: Layout,
    split: Mapping[str, tuple[float, float]] | None,
    transform: Mapping[str, Any],
    operations: FileOperations | None = None,
) -> Manifest:
    manifest = store.manifest
    provenance = kept_inputs(store)
    transforms = [*provenance.get("transforms", []), dict(transform)]
    columns = {name: store.column(name) for name in store.columns}
    with StoreWriter(
        target,
        vocab_size=manifest.vocab_size,
        eod_id=manifest.eod_id,
        layout=layout,
        split=split,
        tokenizer=kept_tokenizer(store),
        provenance={**provenance, "transforms": transforms},
        columns={name: values.dtype for name, values in columns.items()},
        sentences=store.has_sentences,
        operations=operations,
    ) as writer:
        for name in columns:
            writer.add_labels(name, column_labels(store, name).values())
        copy_documents(store, writer, first=first, stop=stop)
        erasures = manifest.erasures if (first, stop) == (0, len(store)) else ()
        return writer.commit(erasures=tuple(replace(item, revision=None) for item in erasures))


def copy_documents(store: TokenStore, writer: StoreWriter, *, first: int, stop: int) -> None:
    """Write documents ``first`` to ``stop`` of a store, with what it keeps beside them."""
    columns = {name: store.column(name) for name in store.columns}
    for start, end in _blocks(store, first, stop):
        _copy_block(store, writer, start, end, columns)


def _blocks(store: TokenStore, first: int, stop: int) -> list[tuple[int, int]]:
    """Ranges of documents with about ``_BLOCK_TOKENS`` tokens each."""
    ends = np.cumsum(store.doc_length[first:stop])
    groups = ends // _BLOCK_TOKENS
    borders = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(ends)]
    return [(first + start, first + end) for start, end in pairwise(borders) if start < end]


def _copy_block(
    store: TokenStore, writer: StoreWriter, start: int, end: int, columns: Mapping[str, Any]
) -> None:
    tokens = [document for document in store[start:end] if len(document)]
    doc_sentences = sentence_lengths = None
    if store.has_sentences:
        before = int(store.doc_sentences[:start].sum())
        doc_sentences = store.doc_sentences[start:end]
        sentence_lengths = store.sentence_length[before : before + int(doc_sentences.sum())]
    writer.add_many(
        np.concatenate(tokens) if tokens else np.empty(0, store.dtype),
        lengths=store.doc_length[start:end],
        sentence_lengths=sentence_lengths,
        doc_sentences=doc_sentences,
        columns={name: values[start:end] for name, values in columns.items()},
    )


def kept_tokenizer(store: TokenStore) -> TokenizerFile | None:
    """The tokenizer that a store keeps."""
    record = store.manifest.tokenizer
    if record is None:
        return None
    if isinstance(store, RemoteTokenStore):
        content = store.read_file(record.file)
    else:
        part = store.parts[0]
        whole = part.folder if isinstance(part, StorePart) else None
        content = (whole or StoreFolder(store.path, store.manifest)).read(record.file)
    return TokenizerFile(kind=record.kind, content=content, file=record.file, name=record.name)
