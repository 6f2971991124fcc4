"""Words of a text and hashes of word sequences: what near copies and leaked tests share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

__all__ = ["hash_sequences", "mix", "word_hashes", "word_spans", "words_of"]

# Scripts that put no space between words: each of their characters is a word.
_ALONE = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
)
_WORD = re.compile(f"[{_ALONE}]|[^\\W_{_ALONE}]+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case; signs and white space are left out."""
    found: list[str] = _WORD.findall(text.lower())
    return found


def word_spans(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield each word in lower case with its start and end in the text."""
    for match in _WORD.finditer(text):
        yield match.group().lower(), match.start(), match.end()


def word_hashes(words: Sequence[str]) -> NDArray[np.uint64]:
    """Return a hash of each word, [words]."""
    codes = (crc32(word.encode("utf-8", "surrogatepass")) for word in words)
    return mix(np.fromiter(codes, np.uint64, count=len(words)))


def hash_sequences(hashes: NDArray[np.uint64], length: int) -> NDArray[np.uint64]:
    """Return the hash of each run of ``length`` words, [words - length + 1]; none if too few."""
    count = len(hashes) - length + 1
    if count < 1:
        return np.empty(0, np.uint64)
    result = np.zeros(count, np.uint64)
    for place in range(length):
        result = result * _FACTOR + hashes[place : place + count]
    return mix(result)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread values over 64 bits (the finish of splitmix64), so that like ones become unlike."""
    values = values + _FACTOR
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
