"""Permutations that are computed, not stored: sample ``i`` of an epoch in constant time and memory.

A Feistel network permutes the numbers below the next power of two; numbers outside the range walk
on until they fall inside, at most twice on average.
"""

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["EpochOrder", "Permutation", "mix"]

_MASK = 2**64 - 1
_ODD = 0x9E3779B97F4A7C15
_MULTIPLIER = 0xD6E8FEB86659FD93
_ROUNDS = 6
_BLOCK = 4096
_MOST_BLOCKS = 256
"""Blocks that are kept: 8 MB."""
_RECENT = 4


def mix(*numbers: int) -> int:
    """One well mixed 64-bit number from several (SplitMix64's finaliser over each)."""
    state = 0
    for number in numbers:
        state = (state + number * _ODD + _ODD) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


class Permutation:
    """A pseudo-random permutation of the numbers below ``size``.

    Args:
        size: How many numbers there are.
        key: Chooses the permutation; the same key always gives the same one.
    """

    def __init__(self, size: int, *, key: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least one number, not {size}")
        self.size = size
        bits = max(2, (size - 1).bit_length())
        self._low_bits = bits // 2
        self._high_bits = bits - self._low_bits
        self._keys = [mix(key, number) for number in range(_ROUNDS)]

    def __call__(self, number: int) -> int:
        """The number at place ``number``."""
        while True:
            number = self._walk(number)
            if number < self.size:
                return number

    def _walk(self, number: int) -> int:
        low_bits = self._low_bits
        low_shift, high_shift = 64 - low_bits, 64 - self._high_bits
        high, low = number >> low_bits, number & ((1 << low_bits) - 1)
        keys = self._keys
        for place in range(0, _ROUNDS, 2):
            mixed = ((low ^ keys[place]) * _MULTIPLIER) & _MASK
            high ^= ((mixed ^ (mixed >> 32)) * _ODD & _MASK) >> high_shift
            mixed = ((high ^ keys[place + 1]) * _MULTIPLIER) & _MASK
            low ^= ((mixed ^ (mixed >> 32)) * _ODD & _MASK) >> low_shift
        return high << low_bits | low

    def many(self, numbers: NDArray[Any]) -> NDArray[np.int64]:
        """[n] the numbers at places ``numbers`` [n]."""
        result = self._walk_many(numbers.astype(np.uint64))
        outside = np.flatnonzero(result >= self.size)
        while len(outside):
            result[outside] = self._walk_many(result[outside])
            outside = outside[result[outside] >= self.size]
        return result.astype(np.int64)

    def _walk_many(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        low_bits = np.uint64(self._low_bits)
        high, low = numbers >> low_bits, numbers & np.uint64((1 << self._low_bits) - 1)
        for place in range(0, _ROUNDS, 2):
            high = high ^ _scramble(low, self._keys[place], bits=self._high_bits)
            low = low ^ _scramble(high, self._keys[place + 1], bits=self._low_bits)
        return high << low_bits | low


def _scramble(half: NDArray[np.uint64], key: int, *, bits: int) -> NDArray[np.uint64]:
    mixed = (half ^ np.uint64(key)) * np.uint64(_MULTIPLIER)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(_ODD)
    return mixed >> np.uint64(64 - bits)


class EpochOrder:
    """The endless order of samples: one permutation of the same ``size`` numbers after another.

    Args:
        size: Samples of an epoch.
        seed: Chooses the permutations.
        shuffle: False keeps the numbers in order in every epoch.
    """

    def __init__(self, size: int, *, seed: int, shuffle: bool = True) -> None:
        if size < 1:
            raise ValueError(f"an epoch needs at least one sample, not {size}")
        self.size = size
        self._seed = seed
        self._shuffle = shuffle
        self._permutation: tuple[int, Permutation] | None = None
        self._blocks: dict[int, NDArray[np.int64]] = {}
        self._recent: deque[int] = deque(maxlen=_RECENT)

    def locate(self, number: int) -> tuple[int, int]:
        """Epoch and sample of place ``number`` of the endless order.

        Neighbouring places are computed by the block, since they are usually asked for together.
        """
        epoch, place = divmod(number, self.size)
        if not self._shuffle:
            return epoch, place
        block = self._blocks.get(epoch * self.size + place // _BLOCK * _BLOCK)
        if block is None:
            return epoch, self._visit(epoch, place)
        return epoch, int(block[place % _BLOCK])

    def _visit(self, epoch: int, place: int) -> int:
        """The sample at a place whose block is not known.

        Two visits soon after one another compute the block; a lone visit is cheaper alone.
        """
        permutation = self._permutation_of(epoch)
        first = place // _BLOCK * _BLOCK
        name = epoch * self.size + first
        if name not in self._recent:
            self._recent.append(name)
            return permutation(place)
        block = permutation.many(np.arange(first, min(first + _BLOCK, self.size)))
        if len(self._blocks) >= _MOST_BLOCKS:
            self._blocks.clear()
        self._blocks[name] = block
        return int(block[place - first])

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        """[count] the samples at places ``start`` to ``start + count``."""
        places = np.arange(start, start + count, dtype=np.int64)
        if not self._shuffle:
            return places % self.size
        epochs = places // self.size
        samples = places % self.size
        for epoch in np.unique(epochs).tolist():
            inside = epochs == epoch
            samples[inside] = self._permutation_of(epoch).many(samples[inside])
        return samples

    def _permutation_of(self, epoch: int) -> Permutation:
        known = self._permutation
        if known is None or known[0] != epoch:
            known = (epoch, Permutation(self.size, key=mix(self._seed, epoch)))
            self._permutation = known
        return known[1]
