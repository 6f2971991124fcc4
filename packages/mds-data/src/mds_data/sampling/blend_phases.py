"""A blend whose weights change on the way: each source goes on where it stood, whatever comes.

A phase begins at a place of the blend and has weights of its own. The whole is a pure function of
its phases, so a change in the middle of a run needs no other state than the list of them.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mds_data.sampling.blend import BlendOrder, balanced_blend, megatron_blend

__all__ = ["BlendPhase", "OrderName", "PhasedBlend"]

OrderName = Literal["balanced", "megatron"]


@dataclass(frozen=True, slots=True)
class BlendPhase:
    """From place ``start`` on, sources come by these weights."""

    start: int
    weights: tuple[float, ...]


class PhasedBlend:
    """Source and number within the source of each place.

    Args:
        phases: In order; the first one starts at 0. A phase may know fewer sources than the last.
        count: Places of the blend.
        order: ``"balanced"`` or ``"megatron"``, of each phase by itself.

    Raises:
        ValueError: The phases are not in order, or a weight can't be.
    """

    def __init__(self, phases: Sequence[BlendPhase], *, count: int, order: OrderName) -> None:
        if order not in ("balanced", "megatron"):
            raise ValueError(f"order must be 'balanced' or 'megatron', not {order!r}")
        starts = [phase.start for phase in phases]
        if not starts or starts[0] != 0 or sorted(set(starts)) != starts:
            raise ValueError(f"phases must start at 0 and then later and later, not at {starts}")
        self._starts = starts
        sources = max(len(phase.weights) for phase in phases)
        self._orders: list[BlendOrder] = []
        self._before: list[list[int]] = [[0] * sources]
        for phase, stop in zip(phases, [*starts[1:], count], strict=True):
            weights = [*phase.weights, *[0.0] * (sources - len(phase.weights))]
            places = max(stop - phase.start, 0)
            self._orders.append(_ordered(weights, count=places, order=order))
            taken = self._orders[-1].counts(places)
            self._before.append([a + b for a, b in zip(self._before[-1], taken, strict=True)])

    def locate(self, place: int) -> tuple[int, int]:
        """Source, and number of its sample, counted without end."""
        phase = bisect_right(self._starts, place) - 1
        source, number = self._orders[phase].locate(place - self._starts[phase])
        return source, number + self._before[phase][source]

    def phases_until(self, place: int) -> int:
        """How many phases have begun at a place."""
        return bisect_right(self._starts, place)

    def counts(self, place: int) -> list[int]:
        """Samples that each source gave before ``place``."""
        phase = bisect_right(self._starts, place) - 1
        taken = self._orders[phase].counts(place - self._starts[phase])
        return [a + b for a, b in zip(self._before[phase], taken, strict=True)]

    def arrays(self, start: int, count: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """[count] sources and [count] numbers within the source from place ``start`` on."""
        sources, numbers = [], []
        for phase, (begin, order) in enumerate(zip(self._starts, self._orders, strict=True)):
            end = self._starts[phase + 1] if phase + 1 < len(self._starts) else start + count
            first, last = max(begin, start), min(end, start + count)
            if first < last:
                found, inner = order.arrays(last - first, start=first - begin)
                sources.append(found)
                numbers.append(inner + np.array(self._before[phase], np.int64)[found])
        if not sources:
            return np.empty(0, np.int16), np.empty(0, np.int64)
        return np.concatenate(sources), np.concatenate(numbers)


def _ordered(weights: Sequence[float], *, count: int, order: OrderName) -> BlendOrder:
    if order == "balanced":
        return balanced_blend(weights, count=count)
    sources, _ = megatron_blend(weights, count=count)
    filled = sources if count else np.zeros(1, np.int16)  # an order has at least one place
    return BlendOrder(filled, num_sources=len(weights))
