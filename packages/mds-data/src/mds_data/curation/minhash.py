"""MinHash signatures: short rows of numbers whose agreement estimates how alike two texts are.

The share of equal places in two signatures estimates the Jaccard index of the sets of word
sequences. Cut into bands, signatures find candidates without comparing all pairs.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from mds_data.curation.words import hash_sequences, mix, word_hashes, words_of

__all__ = ["BandPlan", "band_keys", "plan_bands", "shingles", "signature"]

_BLOCK = 2048
_STEPS = 200


def shingles(text: str, *, size: int) -> NDArray[np.uint64]:
    """Return the hashes of a text's different sequences of ``size`` words; at least one."""
    hashes = word_hashes(words_of(text))
    found = hash_sequences(hashes, min(size, max(len(hashes), 1)))
    if not len(found):  # no word at all: alike is only the very same text
        return word_hashes([text])
    return np.unique(found)


@cache
def _functions(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Factors and summands of ``count`` hash functions (multiply, add, shift)."""
    values = mix(np.arange(2 * count, dtype=np.uint64))
    return values[:count] | np.uint64(1), values[count:]


def signature(hashes: NDArray[np.uint64], *, count: int) -> NDArray[np.uint32]:
    """Return the least value of each of ``count`` hash functions over a set, [count]."""
    factors, summands = _functions(count)
    least = np.full(count, 2**32 - 1, np.uint32)
    for start in range(0, len(hashes), _BLOCK):
        block = hashes[start : start + _BLOCK, None] * factors + summands  # [block, count]
        np.minimum(least, (block.min(axis=0) >> np.uint64(32)).astype(np.uint32), out=least)
    return least


class BandPlan:
    """How a signature is cut: ``bands`` bands of ``rows`` places each."""

    def __init__(self, bands: int, rows: int) -> None:
        self.bands = bands
        self.rows = rows

    def chance(self, similarity: float) -> float:
        """Return the chance that two texts so alike share a band."""
        return float(1 - (1 - similarity**self.rows) ** self.bands)


def plan_bands(count: int, *, threshold: float) -> BandPlan:
    """Return the cut of ``count`` places that errs least around a similarity.

    Pairs that are missed weigh eight times: false candidates are compared later and cost time only.
    """

    def error(plan: BandPlan) -> float:
        points = (np.arange(_STEPS) + 0.5) / _STEPS
        chances = 1 - (1 - points**plan.rows) ** plan.bands
        below = float(chances[points < threshold].sum())
        return (below + 8 * float((1 - chances[points >= threshold]).sum())) / _STEPS

    plans = (
        BandPlan(bands, rows)
        for rows in range(1, count + 1)
        for bands in range(1, count // rows + 1)
    )
    return min(plans, key=error)


def band_keys(signature: NDArray[np.uint32], plan: BandPlan) -> NDArray[np.uint64]:
    """Return one key a band, [..., bands], of signatures [..., places].

    Equal keys mean equal bands.
    """
    cut = signature[..., : plan.bands * plan.rows].astype(np.uint64)
    rows = cut.reshape(*signature.shape[:-1], plan.bands, plan.rows)
    keys = np.broadcast_to(np.arange(plan.bands, dtype=np.uint64), rows.shape[:-1])
    for place in range(plan.rows):
        keys = mix(keys ^ rows[..., place])
    return keys
