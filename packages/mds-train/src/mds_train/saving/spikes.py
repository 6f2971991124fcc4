"""Finds steps whose loss jumps far above that of the steps before."""

from __future__ import annotations

import math
import statistics
from collections import deque

__all__ = ["SpikeDetector"]


class SpikeDetector:
    """Compares each loss with the median of the last ones. The loss is the same on all ranks.

    Args:
        factor: A loss greater than this many times the median is a spike; None finds none.
        window: How many steps the median is over; before it is full, nothing is a spike.
    """

    def __init__(self, factor: float | None, *, window: int = 20) -> None:
        self._factor = factor
        self._losses: deque[float] = deque(maxlen=window)

    def is_spike(self, loss: float) -> bool:
        """Take in a step's loss; say whether it stands out."""
        full = len(self._losses) == self._losses.maxlen
        if not math.isfinite(loss):
            return False  # such a step is skipped, and has its own event
        spike = (
            self._factor is not None
            and full
            and loss > self._factor * statistics.median(self._losses)
        )
        if not spike:  # a plateau of spikes must not become the new normal at once
            self._losses.append(loss)
        return spike
