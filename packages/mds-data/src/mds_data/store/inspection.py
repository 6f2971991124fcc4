"""What a person wants to know about a store, as data; the command line prints it."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mds_data.store.columns import column_labels
from mds_data.store.records import Manifest
from mds_data.store.token_store import TokenStore, open_store

__all__ = [
    "ColumnSummary",
    "ColumnValue",
    "Inspection",
    "LengthBin",
    "SampleDocument",
    "TokenCount",
    "inspect_store",
]

_BLOCK = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBin:
    """Documents with ``low`` to ``high`` tokens, both included."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCount:
    """How often an id stands in the tokens that were counted."""

    token: int
    count: int
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleDocument:
    """The beginning of one document."""

    number: int
    length: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnValue:
    """A frequent value of a column."""

    value: str
    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnSummary:
    """What one column holds."""

    name: str
    dtype: str
    distinct: int
    low: float | None
    """The least number; None for texts and hashes."""
    high: float | None
    values: tuple[ColumnValue, ...]
    """The most frequent ones; none for hashes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """Counts and samples of a store."""

    path: str
    manifest: Manifest
    documents: int
    empty_documents: int
    tokens: int
    gap_tokens: int
    size: int
    """Bytes of all files."""
    shortest: int
    mean: float
    median: float
    longest: int
    lengths: tuple[LengthBin, ...]
    """Histogram by powers of two."""
    counted_tokens: int
    """Tokens behind `top_tokens`; fewer than `tokens` if the store is large."""
    distinct_tokens: int
    top_tokens: tuple[TokenCount, ...]
    samples: tuple[SampleDocument, ...]
    columns: tuple[ColumnSummary, ...]


def inspect_store(
    store: TokenStore | str | os.PathLike[str],
    *,
    top: int = 20,
    samples: int = 3,
    sample_tokens: int = 64,
    count_at_most: int = 100_000_000,
) -> Inspection:
    """Look at a store or a Megatron pair.

    Args:
        store: An open store, or its path.
        top: How many of the most frequent ids to name.
        samples: How many documents to show, spread evenly over the store.
        sample_tokens: How many ids of each.
        count_at_most: Tokens to count; a larger store is sampled in blocks.
    """
    opened = store if isinstance(store, TokenStore) else open_store(store)
    lengths = opened.doc_length
    filled = lengths[lengths > 0]
    counts, counted = _token_counts(opened, count_at_most)
    tokens = int(lengths.sum())
    return Inspection(
        path=str(opened.path),
        manifest=opened.manifest,
        documents=len(opened),
        empty_documents=len(lengths) - len(filled),
        tokens=tokens,
        gap_tokens=opened.num_positions - tokens,
        size=_size(opened),
        shortest=int(filled.min()) if len(filled) else 0,
        mean=float(filled.mean()) if len(filled) else 0.0,
        median=float(np.median(filled)) if len(filled) else 0.0,
        longest=int(filled.max()) if len(filled) else 0,
        lengths=_histogram(filled),
        counted_tokens=counted,
        distinct_tokens=int(np.count_nonzero(counts)),
        top_tokens=_top(counts, counted, top),
        samples=_samples(opened, samples, sample_tokens),
        columns=tuple(_column(opened, name, top) for name in opened.columns),
    )


def _column(store: TokenStore, name: str, top: int) -> ColumnSummary:
    values, labels = store.column(name), column_labels(store, name)
    found, back, counts = np.unique(values, return_inverse=True, return_counts=True)
    tokens = np.bincount(back, weights=store.doc_length, minlength=len(found))
    is_code = values.dtype == np.dtype("<u8")
    finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    order = np.argsort(-counts, kind="stable")[: 0 if is_code and not labels else top]
    return ColumnSummary(
        name=name,
        dtype=str(values.dtype),
        distinct=len(found),
        low=None if is_code or not len(finite) else float(finite.min()),
        high=None if is_code or not len(finite) else float(finite.max()),
        values=tuple(
            ColumnValue(
                value=labels.get(int(found[each]), "(none)") if is_code else f"{found[each]:g}",
                documents=int(counts[each]),
                tokens=int(tokens[each]),
            )
            for each in order.tolist()
        ),
    )


def _size(store: TokenStore) -> int:
    records = [record for part in store.parts for record in part.manifest.files.values()]
    if records:
        return sum(record.size for record in records)
    return store.num_positions * store.dtype.itemsize


def _histogram(lengths: NDArray[np.int64]) -> tuple[LengthBin, ...]:
    if not len(lengths):
        return ()
    bins = np.floor(np.log2(lengths)).astype(np.int64)
    return tuple(
        LengthBin(
            low=2**number,
            high=2 ** (number + 1) - 1,
            documents=int((bins == number).sum()),
            tokens=int(lengths[bins == number].sum()),
        )
        for number in range(int(bins.min()), int(bins.max()) + 1)
    )


def _token_counts(store: TokenStore, at_most: int) -> tuple[NDArray[np.int64], int]:
    """Occurrences of each id in document tokens, from the whole store or evenly spread blocks."""
    counts = np.zeros(0, np.int64)
    counted = 0
    ends = np.cumsum(store.doc_length)
    blocks = np.arange(0, int(ends[-1]) if len(ends) else 0, _BLOCK)
    step = max(1, -(-len(blocks) * _BLOCK // max(at_most, _BLOCK)))
    for block in blocks[::step].tolist():
        first = int(np.searchsorted(ends, block, side="right"))
        last = int(np.searchsorted(ends, block + _BLOCK, side="right"))
        ids = _joined(store, first, max(last, first + 1))
        if len(ids):
            found = np.bincount(ids[ids >= 0])
            size = max(len(found), len(counts))
            counts = _padded(counts, size) + _padded(found, size)
            counted += len(ids)
    return counts, counted


def _joined(store: TokenStore, first: int, last: int) -> NDArray[Any]:
    """The tokens of documents ``first`` to ``last``, of each at most a block."""
    starts, lengths = store.doc_start[first:last], store.doc_length[first:last]
    pieces = [
        store.tokens(start, start + min(length, 4 * _BLOCK))
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        if length
    ]
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def _padded(counts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    return np.pad(counts, (0, size - len(counts)))


def _top(counts: NDArray[np.int64], counted: int, top: int) -> tuple[TokenCount, ...]:
    order = np.argsort(-counts, kind="stable")[:top]
    return tuple(
        TokenCount(token=int(token), count=int(counts[token]), share=int(counts[token]) / counted)
        for token in order
        if counts[token]
    )


def _samples(store: TokenStore, samples: int, tokens: int) -> tuple[SampleDocument, ...]:
    filled = np.flatnonzero(store.doc_length)
    if not len(filled) or not samples:
        return ()
    chosen = filled[np.unique(np.linspace(0, len(filled) - 1, samples).astype(np.int64))]
    result = []
    for number in chosen.tolist():
        start, length = int(store.doc_start[number]), int(store.doc_length[number])
        ids = store.tokens(start, start + min(tokens, length))
        result.append(SampleDocument(number=number, length=length, tokens=tuple(ids.tolist())))
    return tuple(result)
