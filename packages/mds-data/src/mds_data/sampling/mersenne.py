"""The random numbers of C++'s ``std::mt19937`` and ``std::mt19937_64``, by the block in numpy.

The original orders BERT's and T5's samples by them; the same seed must give the same order.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["numbers32", "numbers64"]

_BLOCK = 4096
_SIZE, _MIDDLE = 312, 156
_MATRIX = np.uint64(0xB5026F5AA96619E9)
_UPPER, _LOWER = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
_MULTIPLIER = 6364136223846793005


def numbers32(seed: int) -> Iterator[NDArray[np.uint64]]:
    """Blocks of the 32-bit numbers of ``std::mt19937(seed)``, without end."""
    random = np.random.RandomState(seed & 0xFFFFFFFF)  # seeds as C++ does
    while True:
        yield random.randint(0, 2**32, _BLOCK, np.uint32).astype(np.uint64)


def numbers64(seed: int) -> Iterator[NDArray[np.uint64]]:
    """Blocks of the 64-bit numbers of ``std::mt19937_64(seed)``, without end."""
    state = _seeded(seed)
    while True:
        state = _twisted(state)
        yield _tempered(state)


def _seeded(seed: int) -> NDArray[np.uint64]:
    value = seed & 0xFFFFFFFFFFFFFFFF
    words = [value]
    for place in range(1, _SIZE):
        value = (_MULTIPLIER * (value ^ (value >> 62)) + place) & 0xFFFFFFFFFFFFFFFF
        words.append(value)
    return np.array(words, np.uint64)


def _twisted(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The next state; its second half needs the new first half, its last word the new first one."""
    new = np.empty_like(state)
    new[:_MIDDLE] = state[_MIDDLE:] ^ _mixed(state[:_MIDDLE], state[1 : _MIDDLE + 1])
    following = np.append(state[_MIDDLE + 1 :], new[0])
    new[_MIDDLE:] = new[:_MIDDLE] ^ _mixed(state[_MIDDLE:], following)
    return new


def _mixed(high: NDArray[np.uint64], low: NDArray[np.uint64]) -> NDArray[np.uint64]:
    joined = (high & _UPPER) | (low & _LOWER)
    return (joined >> np.uint64(1)) ^ (joined & np.uint64(1)) * _MATRIX


def _tempered(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = words ^ (words >> np.uint64(29)) & np.uint64(0x5555555555555555)
    words = words ^ (words << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
    words = words ^ (words << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
    return words ^ (words >> np.uint64(43))
