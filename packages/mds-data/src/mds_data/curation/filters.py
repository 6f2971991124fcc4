"""Judge a text by its length and by how much of it repeats: the rules of Gopher and C4.

Each rule gives the share it measured; a text is removed where it is over a limit. The limits of
repetition are those of Rae et al. 2021 (Gopher), table A1.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mds_data.curation.words import hash_sequences, word_hashes, words_of

__all__ = ["LengthLimits", "RepetitionLimits", "length_fault", "repetition_faults"]

_PARAGRAPHS = re.compile(r"\n[ \t\r]*\n\s*")
_WORDS = 100_000
"""Words of a text that are looked at; longer ones are judged by their beginning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthLimits:
    """How short and how long a text may be; None is no limit."""

    min_characters: int | None = None
    max_characters: int | None = None
    min_words: int | None = None
    max_words: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RepetitionLimits:
    """Shares of a text that repetition may take, from 0 to 1."""

    lines: float = 0.30
    """Lines that stand there already."""
    line_characters: float = 0.20
    """Characters in them."""
    paragraphs: float = 0.30
    top_ngrams: Mapping[int, float] = field(default_factory=lambda: {2: 0.20, 3: 0.18, 4: 0.16})
    """Words in the most frequent sequence, by its length."""
    repeated_ngrams: Mapping[int, float] = field(
        default_factory=lambda: {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
    )
    """Words in sequences that stand there more than once, by their length."""


def length_fault(text: str, limits: LengthLimits) -> str | None:
    """Return how a text breaks the limits, or None."""
    bounds = (limits.min_characters, limits.max_characters)
    fault = _outside(len(text), *bounds, unit="characters")
    if fault is None and (limits.min_words is not None or limits.max_words is not None):
        fault = _outside(len(text.split()), limits.min_words, limits.max_words, unit="words")
    return fault


def _outside(count: int, low: int | None, high: int | None, *, unit: str) -> str | None:
    if low is not None and count < low:
        return f"{count} {unit}, fewer than {low}"
    if high is not None and count > high:
        return f"{count} {unit}, more than {high}"
    return None


def repetition_faults(text: str, limits: RepetitionLimits) -> Iterator[str]:
    """Yield what of a text repeats more than it may."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    share, characters = _repeated(lines)
    if share > limits.lines:
        yield f"{share:.0%} of the lines repeat"
    if characters > limits.line_characters:
        yield f"{characters:.0%} of the characters lie in lines that repeat"
    share, _ = _repeated([each.strip() for each in _PARAGRAPHS.split(text) if each.strip()])
    if share > limits.paragraphs:
        yield f"{share:.0%} of the paragraphs repeat"
    yield from _ngram_faults(words_of(text[: 16 * _WORDS])[:_WORDS], limits)


def _repeated(parts: Sequence[str]) -> tuple[float, float]:
    """Return the share of parts that stand there already, and of their characters."""
    if len(parts) < 2:
        return 0.0, 0.0
    again = [(count - 1, len(part)) for part, count in Counter(parts).items() if count > 1]
    total = sum(map(len, parts))
    return (
        sum(count for count, _ in again) / len(parts),
        sum(count * length for count, length in again) / max(total, 1),
    )


def _ngram_faults(words: Sequence[str], limits: RepetitionLimits) -> Iterator[str]:
    hashes = word_hashes(words)
    lengths = np.array([len(word) for word in words], np.int64)
    total = max(int(lengths.sum()), 1)
    for size, limit in limits.top_ngrams.items():
        found, first, counts = np.unique(
            hash_sequences(hashes, size), return_index=True, return_counts=True
        )
        if len(found) and int(counts.max()) > 1:
            place = int(first[int(counts.argmax())])
            share = int(counts.max()) * int(lengths[place : place + size].sum()) / total
            if share > limit:
                shown = " ".join(words[place : place + size])
                yield f"{min(share, 1):.0%} of the text is {shown[:60]!r}"
    for size, limit in limits.repeated_ngrams.items():
        _, back, counts = np.unique(
            hash_sequences(hashes, size), return_inverse=True, return_counts=True
        )
        marked = np.zeros(len(words) + 1, np.int64)
        again = np.flatnonzero(counts[back] > 1) if len(counts) else np.empty(0, np.int64)
        np.add.at(marked, again, 1)
        np.add.at(marked, again + size, -1)
        share = int(lengths[np.cumsum(marked)[:-1] > 0].sum()) / total
        if share > limit:
            yield f"{share:.0%} of the text lies in repeated sequences of {size} words"
