"""Orders of samples that begin with easy ones: which samples may come is decided by difficulty.

A sample enters when each of its difficulties is reached. Samples that enter together form a
cluster; at any time the clusters that have entered are blended by their sizes, each in a permuted
order of its own that goes on from batch to batch. So a sample comes again only when its cluster has
been shown wholly, and the whole order is a function of seed and place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mds_data.sampling.blend_phases import BlendPhase, PhasedBlend
from mds_data.sampling.pacing import Pacing
from mds_data.sampling.permutation import EpochOrder, mix

__all__ = ["CurriculumOrder", "Difficulty"]

_FINEST_SHARE = 4096
_ENDLESS = 2**62
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True, slots=True)
class Difficulty:
    """One measure of samples, and how much of it is allowed when."""

    values: NDArray[Any]
    """[samples] difficulty of each sample."""
    pacing: Pacing
    """Its progress is counted in samples."""
    by: Literal["value", "percentile"] = "value"
    """Compare the values themselves, or their ranks from 0 to 100."""

    def entry(self) -> NDArray[np.int64]:
        """[samples] the place in the order from which each sample may come."""
        levels = self.pacing.levels()
        thresholds = np.array([difficulty for difficulty, _ in levels])
        starts = np.array([*(start for _, start in levels), _NEVER], np.int64)
        compared = self.values if self.by == "value" else _percentiles(self.values)
        found: NDArray[np.int64] = starts[np.searchsorted(thresholds, compared, side="left")]
        return found


def _percentiles(values: NDArray[Any]) -> NDArray[np.float64]:
    """[n] share in percent of the values that are not larger; ties by number."""
    ranks = np.empty(len(values), np.float64)
    ranks[np.argsort(values, kind="stable")] = np.arange(1, len(values) + 1)
    return ranks * (100.0 / max(len(values), 1))


class CurriculumOrder:
    """The endless order of samples under one or several difficulties.

    Use it as the ``order`` of a `ResumableSampler`.

    Args:
        difficulties: All must allow a sample before it comes.
        seed: Chooses the permutations.

    Raises:
        ValueError: No sample is allowed at the beginning, or the values are not as many.
    """

    def __init__(self, difficulties: Sequence[Difficulty], *, seed: int = 1234) -> None:
        sizes = {len(each.values) for each in difficulties}
        if len(sizes) != 1:
            raise ValueError(f"each difficulty needs a value for every sample, not {sorted(sizes)}")
        entry = np.max([each.entry() for each in difficulties], axis=0)
        self.left_out = int((entry == _NEVER).sum())
        """Samples that are harder than the maximum and never come."""
        self.size = len(entry) - self.left_out
        order = np.argsort(entry, kind="stable")[: self.size]
        starts, firsts = np.unique(entry[order], return_index=True)
        if not len(starts) or starts[0] != 0:
            begin = f"; the easiest come from sample {starts[0]} on" if len(starts) else ""
            raise ValueError(
                f"no sample is as easy as the beginning allows{begin}; raise the minimum difficulty"
            )
        self._members = np.split(order, firsts[1:])
        self._orders = [
            EpochOrder(len(members), seed=mix(seed, number, 5))
            for number, members in enumerate(self._members)
        ]
        counts = [len(members) for members in self._members]
        self._blend = PhasedBlend(
            [
                BlendPhase(start, _shares(counts[: number + 1]))
                for number, start in enumerate(starts.tolist())
            ],
            count=_ENDLESS,
            order="balanced",
        )

    def allowed(self, place: int) -> int:
        """Samples that may come at a place of the order."""
        counts = self._blend.phases_until(place)
        return sum(len(members) for members in self._members[:counts])

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        """[count] sample numbers at places ``start`` to ``start + count``."""
        sources, numbers = self._blend.arrays(start, count)
        result = np.empty(count, np.int64)
        for source in np.unique(sources).tolist():
            places = np.flatnonzero(sources == source)
            first = int(numbers[places[0]])  # a cluster's numbers run on without a gap
            chosen = self._orders[source].indices(first, len(places))
            result[places] = self._members[source][chosen]
        return result


def _shares(counts: Sequence[int]) -> tuple[float, ...]:
    """Sizes as small whole numbers, so that the blend's period stays short."""
    total = sum(counts)
    if total <= _FINEST_SHARE:
        return tuple(map(float, counts))
    return tuple(float(max(1, round(count * _FINEST_SHARE / total))) for count in counts)
