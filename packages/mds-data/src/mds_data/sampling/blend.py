"""The order in which samples of several datasets are mixed. Pure arithmetic, no data.

`balanced_blend` keeps every source within one sample of its share at every prefix: sample ``j`` of
a source with share ``w`` gets a place from ``(j - 1) / w`` to ``j / w``, and of those that may come
the most urgent comes first, which always succeeds (Tijdeman's chairman assignment).
`megatron_blend` is the original's greedy order.
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

__all__ = ["BlendOrder", "balanced_blend", "megatron_blend", "megatron_counts", "shares"]

_DENOMINATOR = 10**9
_FEW = 16
_LEARNED = 2048
_BLOCK = 2**15


def shares(weights: Sequence[float]) -> tuple[Fraction, ...]:
    """Weights as exact shares that add up to 1.

    Raises:
        ValueError: A weight is negative or not a number, or all are 0.
    """
    for number, weight in enumerate(weights):
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(
                f"weight {number} is {weight}; weights must be finite and not negative"
            )
    exact = [Fraction(weight).limit_denominator(_DENOMINATOR) for weight in weights]
    total = sum(exact)
    if not total:
        raise ValueError(f"the weights {list(weights)} must hold at least one above 0")
    return tuple(weight / total for weight in exact)


class BlendOrder:
    """Source and number within the source of each place of a blend.

    Args:
        sources: [period] the source of each place; the order repeats after it.
        num_sources: How many sources there are.
    """

    def __init__(self, sources: NDArray[np.int16], *, num_sources: int) -> None:
        self._sources = sources
        self._period = len(sources)
        self._numbers = np.empty(self._period, np.int64)
        self._counts = [0] * num_sources
        for source in range(num_sources):
            places = np.flatnonzero(sources == source)
            self._numbers[places] = np.arange(len(places))
            self._counts[source] = len(places)

    def locate(self, place: int) -> tuple[int, int]:
        """Source, and number of its sample, counted without end."""
        period, inside = divmod(place, self._period)
        source = int(self._sources[inside])
        return source, int(self._numbers[inside]) + period * self._counts[source]

    def counts(self, place: int) -> list[int]:
        """Samples that each source gave before ``place``."""
        periods, inside = divmod(place, self._period)
        begun = np.bincount(self._sources[:inside], minlength=len(self._counts)).tolist()
        return [periods * each + more for each, more in zip(self._counts, begun, strict=True)]

    def arrays(self, count: int, *, start: int = 0) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """[count] sources and [count] numbers within the source from place ``start`` on."""
        places = np.arange(start, start + count, dtype=np.int64)
        periods, inside = places // self._period, places % self._period
        sources = self._sources[inside]
        counts = np.array(self._counts, np.int64)
        return sources, self._numbers[inside] + periods * counts[sources]


def balanced_blend(weights: Sequence[float], *, count: int) -> BlendOrder:
    """The default order of ``count`` places: every source within 1 of its share at every prefix."""
    exact = shares(weights)
    whole = math.lcm(*(share.denominator for share in exact))
    period = max(1, min(count, whole))
    parts = [share.numerator * (whole // share.denominator) for share in exact]
    filled = [source for source, part in enumerate(parts) if part]
    if len(filled) <= 2 and whole < 2**31:
        sources = _two_sources(parts, filled, whole=whole, count=period)
    else:
        sources = _most_urgent(parts, filled, whole=whole, count=period)
    return BlendOrder(sources, num_sources=len(weights))


def _two_sources(
    parts: Sequence[int], filled: Sequence[int], *, whole: int, count: int
) -> NDArray[np.int16]:
    """With two sources, rounding the first one's share keeps both within a half."""
    first, last = filled[0], filled[-1]
    taken = (np.arange(count + 1, dtype=np.int64) * parts[first] * 2 + whole) // (2 * whole)
    return np.where(np.diff(taken) > 0, first, last).astype(np.int16)


def _most_urgent(
    parts: Sequence[int], filled: Sequence[int], *, whole: int, count: int
) -> NDArray[np.int16]:
    sources = np.empty(count, np.int16)
    numbers = dict.fromkeys(filled, 1)
    ready = [(-(-whole // parts[source]), source) for source in filled]
    heapq.heapify(ready)
    waiting: list[tuple[int, int]] = []
    for place in range(count):
        while waiting and waiting[0][0] <= place:
            _, source = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-numbers[source] * whole // parts[source]), source))
        source = heapq.heappop(ready)[1]
        sources[place] = source
        heapq.heappush(waiting, (numbers[source] * whole // parts[source], source))
        numbers[source] += 1
    return sources


def megatron_counts(weights: Sequence[float], *, num_samples: int) -> list[int]:
    """Samples that the original asks of each source: its share and 0.5 % more, rounded up.

    The original's blend has the sum of these as its length.
    """
    return [math.ceil(num_samples * weight * 1.005) for weight in _megatron_shares(weights)]


def _megatron_shares(weights: Sequence[float]) -> list[float]:
    """Weights over their sum, added up from left to right as the original does."""
    shares(weights)  # refuses what is no weight
    total = 0.0
    for weight in weights:
        total += weight
    return [weight / total for weight in weights]


def megatron_blend(
    weights: Sequence[float], *, count: int
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """The original's greedy order, bit for bit: the source that lags most comes next.

    Returns:
        [count] sources and [count] numbers within the source.
    """
    normalised = np.array(_megatron_shares(weights), np.float64)
    normalised /= normalised.sum()  # the original does so a second time
    sources = np.empty(count, np.int16)
    _fill_greedily(normalised, sources)
    numbers = np.empty(count, np.int64)
    for source in range(len(weights)):
        places = np.flatnonzero(sources == source)
        numbers[places] = np.arange(len(places))
    return sources, numbers


def _fill_greedily(weights: NDArray[np.float64], sources: NDArray[np.int16]) -> None:
    """Write the greedy order, step by step until it repeats itself, and then by the block.

    A block is a guess, the last period again; every place of it is computed as the loop would, and
    the first one that differs ends the block. So the result is the loop's, whatever rounding does.
    """
    taken = np.zeros(len(weights), np.int64)
    place, learned = 0, _LEARNED
    while place < len(sources):
        stop = min(place + learned, len(sources))
        _step(weights, sources[place:stop], taken, place=place)
        place = stop
        period = _period(sources[max(0, place - _LEARNED) : place])
        if period is None:
            learned *= 2  # weights without a short period are left to the steps
            continue
        while place < len(sources):
            guess = np.resize(sources[place - period : place], min(_BLOCK, len(sources) - place))
            right = _confirmed(weights, guess, taken, place=place)
            sources[place : place + right] = guess[:right]
            taken += np.bincount(guess[:right], minlength=len(weights))
            place += right
            if right < len(guess):
                break


def _step(
    weights: NDArray[np.float64],
    sources: NDArray[np.int16],
    taken: NDArray[np.int64],
    *,
    place: int,
) -> None:
    """The original's loop over the places from ``place`` on; counts into ``taken``."""
    if len(weights) > _FEW:
        for number in range(len(sources)):
            wanted = max(float(place + number), 1.0)
            sources[number] = source = int(np.argmax(weights * wanted - taken))
            taken[source] += 1
        return
    shares, counts = weights.tolist(), taken.tolist()
    for number in range(len(sources)):
        wanted = max(float(place + number), 1.0)
        lags = [share * wanted - count for share, count in zip(shares, counts, strict=True)]
        sources[number] = source = lags.index(max(lags))
        counts[source] += 1
    taken[:] = counts


def _period(row: NDArray[np.int16]) -> int | None:
    """The shortest period of a row that stands in it at least twice."""
    for period in range(1, len(row) // 2 + 1):
        near = row[-1] == row[-1 - period] and row[0] == row[period]
        if near and (row[period:] == row[:-period]).all():
            return period
    return None


def _confirmed(
    weights: NDArray[np.float64], guess: NDArray[np.int16], taken: NDArray[np.int64], *, place: int
) -> int:
    """How many places of a guess the loop would choose, from the first one on."""
    chosen = guess[:, None] == np.arange(len(weights))
    before = taken + np.cumsum(chosen, axis=0) - chosen
    wanted = np.maximum(np.arange(place, place + len(guess), dtype=np.float64), 1.0)
    best = np.argmax(weights * wanted[:, None] - before, axis=1)
    wrong = np.flatnonzero(best != guess)
    return int(wrong[0]) if len(wrong) else len(guess)
