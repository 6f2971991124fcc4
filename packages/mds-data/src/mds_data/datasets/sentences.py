"""Where the sentences (or other parts) of a store's documents lie, and samples made of them.

A sample of BERT or T5 is a stretch of whole sentences of one document that fills a target length.
`MegatronSentenceOrder` is the original's order of such samples, bit for bit; `FastSentenceOrder`
cuts each document once and permutes by computation.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mds_data.sampling.mersenne import numbers32, numbers64
from mds_data.sampling.permutation import EpochOrder, mix
from mds_data.store.token_store import TokenStore

__all__ = [
    "FastSentenceOrder",
    "MegatronSentenceOrder",
    "SentenceOrder",
    "SentenceSpan",
    "SentenceTable",
    "sentence_table",
]

_LONG = 512
"""Tokens; the original leaves out documents with a longer sentence."""


@dataclass(frozen=True, slots=True)
class SentenceTable:
    """Start and length of each sentence, and the first sentence of each document."""

    start: NDArray[np.int64]
    """[n] position of each sentence's first token in the store."""
    length: NDArray[np.int64]
    """[n] tokens of each sentence."""
    first: NDArray[np.int64]
    """[documents + 1] number of each document's first sentence, and the number of all."""


def sentence_table(store: TokenStore) -> SentenceTable:
    """The sentences of a store; a document is one sentence where none were kept."""
    if not store.has_sentences:
        return SentenceTable(store.doc_start, store.doc_length, np.arange(len(store) + 1))
    lengths = store.sentence_length.astype(np.int64)
    counts = store.doc_sentences.astype(np.int64)
    before = np.cumsum(lengths) - lengths
    first = np.concatenate([[0], np.cumsum(counts)])
    document_of = np.repeat(np.arange(len(counts)), counts)
    start = store.doc_start[document_of] + before - before[first[:-1][document_of]]
    return SentenceTable(start, lengths, first)


@dataclass(frozen=True, slots=True)
class SentenceSpan:
    """Sentences ``first`` to ``stop`` of one document, to be cut to ``target`` tokens."""

    first: int
    stop: int
    target: int


class SentenceOrder:
    """Samples by number; see the two kinds of it."""

    documents_left_out: int
    """Documents that make no sample: too few sentences, or an overlong one."""

    def __len__(self) -> int:
        raise NotImplementedError

    def span(self, number: int) -> SentenceSpan:
        """The sentences of sample ``number``."""
        raise NotImplementedError


class _Documents:
    """The documents of a split that can make samples, and how their sentences are grouped."""

    def __init__(
        self, table: SentenceTable, *, first: int, stop: int, target: int, fewest: int
    ) -> None:
        borders = table.first[first : stop + 1]
        counts = np.diff(borders)
        self.ends = np.concatenate([[0], np.cumsum(table.length)])
        """[n + 1] tokens before each sentence of the store."""
        long = np.concatenate([[0], np.cumsum(table.length > _LONG)])
        has_long = (long[borders[1:]] > long[borders[:-1]]) & (counts > 1)
        chosen = (counts >= fewest) & ~has_long
        self.left_out = int((~chosen).sum())
        self.first: list[int] = borders[:-1][chosen].tolist()
        self.stop: list[int] = borders[1:][chosen].tolist()
        self.target = target
        self.fewest = fewest
        self._next = self._whole_steps(int(borders[0]), int(borders[-1]), borders)
        self._origin = int(borders[0])

    def _whole_steps(self, first: int, stop: int, borders: NDArray[np.int64]) -> NDArray[np.int64]:
        """[sentences] where the sample ends that begins at each sentence and is not short."""
        begins = np.arange(first, stop)
        stops = np.searchsorted(self.ends, self.ends[begins] + self.target, side="left")
        stops = np.maximum(stops, begins + self.fewest)
        last = borders[np.searchsorted(borders, begins, side="right")]
        return np.where(stops < last - 1, stops, last)

    def groups(self, targets: Iterator[int] | None) -> Iterator[tuple[int, int, int]]:
        """First sentence, end and target length of each sample of one pass over the documents."""
        steps: list[int] = self._next.tolist()
        ends, fewest, origin = self.ends, self.fewest, self._origin
        target = self.target
        for first, last in zip(self.first, self.stop, strict=True):
            begin = first
            wanted = target if targets is None else next(targets)
            while begin < last:
                if wanted == target:
                    stop = steps[begin - origin]
                else:
                    reach = int(ends[begin]) + wanted
                    stop = begin + int(np.searchsorted(ends[begin : last + 1], reach))
                    stop = max(stop, begin + fewest)
                    stop = stop if stop < last - 1 else last
                yield begin, stop, wanted
                begin = stop
                if targets is not None:
                    wanted = next(targets)


class MegatronSentenceOrder(SentenceOrder):
    """The original's sample mapping for BERT and T5, bit for bit, without its compiled helper.

    Args:
        table: The store's sentences.
        first: First document of the split.
        stop: End of the split.
        num_samples: Samples wanted; whole passes over the documents are laid out. One pass if None.
        target: Tokens of a sample that is not short.
        short_probability: Share of samples that get a random, shorter target.
        fewest: Sentences that a sample needs.
        seed: Seed of lengths and shuffle.
    """

    def __init__(
        self,
        table: SentenceTable,
        *,
        first: int,
        stop: int,
        num_samples: int | None,
        target: int,
        short_probability: float,
        fewest: int,
        seed: int,
    ) -> None:
        documents = _Documents(table, first=first, stop=stop, target=target, fewest=fewest)
        self.documents_left_out = documents.left_out
        ratio = int(1 / short_probability + 0.5) if short_probability > 0 else 0
        targets = _targets(seed, ratio=ratio, longest=target) if ratio else None
        rows = array("q")
        while documents.first and (not rows or len(rows) // 3 < (num_samples or 0)):
            for row in documents.groups(targets):
                rows.extend(row)
        mapping = np.frombuffer(rows, np.int64).reshape(-1, 3) if rows else np.empty((0, 3), int)
        self.mapping = mapping[_shuffled(len(mapping), seed=seed + 1)]
        """[samples, 3] first sentence, end and target length."""

    def __len__(self) -> int:
        return len(self.mapping)

    def span(self, number: int) -> SentenceSpan:
        """The sentences of sample ``number``."""
        return SentenceSpan(*self.mapping[number].tolist())


def _targets(seed: int, *, ratio: int, longest: int) -> Iterator[int]:
    """The target lengths that the original draws, one after the other."""
    for block in numbers32(seed):
        short = 2 + block % np.uint64(longest - 1)
        yield from np.where(block % np.uint64(ratio) == 0, short, np.uint64(longest)).tolist()


def _shuffled(size: int, *, seed: int) -> NDArray[np.int64]:
    """[size] the original's shuffle, from the last place down."""
    places = list(range(size))
    numbers = numbers64(seed)
    last = size - 1
    while last > 0:
        block = next(numbers)[:last]
        sizes = np.arange(last + 1, last + 1 - len(block), -1).astype(np.uint64)
        partners = (block % sizes).tolist()
        for place, partner in zip(range(last, last - len(block), -1), partners, strict=True):
            places[place], places[partner] = places[partner], places[place]
        last -= len(block)
    return np.array(places, np.int64)


class FastSentenceOrder(SentenceOrder):
    """Samples that are cut once and permuted anew in each epoch; a hash decides which are short."""

    def __init__(
        self,
        table: SentenceTable,
        *,
        first: int,
        stop: int,
        num_samples: int | None,
        target: int,
        short_probability: float,
        fewest: int,
        seed: int,
    ) -> None:
        documents = _Documents(table, first=first, stop=stop, target=target, fewest=fewest)
        self.documents_left_out = documents.left_out
        rows = array("q")
        for begin, end, _ in documents.groups(None):
            rows.extend((begin, end))
        self._spans = np.frombuffer(rows, np.int64).reshape(-1, 2) if rows else np.empty((0, 2))
        self._target = target
        self._short = int(short_probability * 2**32)
        self._seed = seed
        self._order = EpochOrder(len(self._spans), seed=seed) if rows else None
        self._length = len(self._spans) if num_samples is None or not rows else num_samples

    def __len__(self) -> int:
        return self._length

    def span(self, number: int) -> SentenceSpan:
        """The sentences of sample ``number``."""
        if self._order is None:
            raise IndexError(f"sample {number} of 0")
        _, place = self._order.locate(number)
        first, stop = self._spans[place].tolist()
        return SentenceSpan(first, stop, self._target_of(number))

    def _target_of(self, number: int) -> int:
        chance = mix(self._seed, number, 2)
        if chance & 0xFFFFFFFF >= self._short:
            return self._target
        return 2 + (chance >> 32) % (self._target - 1)
