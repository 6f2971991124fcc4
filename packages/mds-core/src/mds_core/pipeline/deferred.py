"""Weight gradients that wait, so that a schedule can compute them in its bubbles.

The backward pass of a linear layer then computes the gradient of the input, which the stage before
is waiting for, and leaves the weight's gradient here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from mds_core.layers.linear import ColumnParallelLinear, RowParallelLinear
from mds_core.layers.product import product

__all__ = ["WeightGradients"]


class WeightGradients:
    """Weight gradients of one stage that are still to be computed, in order."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def attach(self, model: nn.Module) -> None:
        """Let every parallel linear layer of ``model`` leave its weight gradients here."""
        for module in model.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.multiply = partial(product, later=self.put)

    def put(self, closure: Callable[[], None]) -> None:
        """Keep one computation for later."""
        self._waiting.append(closure)

    def take(self) -> Callable[[], None]:
        """Hand out what the last backward pass left, as one function that computes it."""
        taken, self._waiting = self._waiting, []

        def run() -> None:
            for closure in taken:
                closure()

        return run
