"""What models give for labels: sums to be trained on, and the losses of the tokens."""

from __future__ import annotations

from typing import NamedTuple, Self

from torch import Tensor

__all__ = ["GPTLoss", "RoutedLoss"]


class GPTLoss(NamedTuple):
    """What a forward pass with labels gives."""

    loss_sum: Tensor
    """Scalar, the masked sum of the tokens' losses, differentiable; fp32, or float64."""
    losses: Tensor
    """[b, s] losses of the tokens, not masked, detached."""


class RoutedLoss(GPTLoss):
    """What a forward pass with labels gives if layers have experts.

    In training ``loss_sum`` contains the cost of uneven routing, for each sequence times the
    weight of its tokens.
    """

    routing_sum: Tensor
    """Scalar, the part of ``loss_sum`` that is this cost, detached."""

    def __new__(
        cls, loss_sum: Tensor, losses: Tensor, *, routing_sum: Tensor | None = None
    ) -> Self:
        """Add the cost to the two members that unpacking gives.

        Wrappers of modules (DeepSpeed's ZeRO-3) rebuild what a module returns from these two alone;
        the result then has no ``routing_sum``.
        """
        made = super().__new__(cls, loss_sum, losses)
        if routing_sum is not None:
            made.routing_sum = routing_sum
        return made
