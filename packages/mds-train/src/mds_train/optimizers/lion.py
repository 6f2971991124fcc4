"""Lion (Chen et al. 2023): steps of one size along the sign of a mean of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Lion"]


class Lion(torch.optim.Optimizer):
    """``w -= lr (sign(b1 m + (1 - b1) g) + weight_decay w)``, then ``m = b2 m + (1 - b2) g``.

    It keeps one tensor, ``exp_avg`` (m), where AdamW keeps two.

    Args:
        params: Parameters or groups of them.
        lr: Size of a step; a tenth to a third of AdamW's is usual.
        betas: ``b1``, how much of the mean a step takes, and ``b2``, how slowly the mean moves.
        weight_decay: Decoupled, as AdamW's.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("Lion takes no closure: it looks at the gradients that are there.")
        for group in self.param_groups:
            self._step_group(group)

    def _step_group(self, group: dict[str, Any]) -> None:
        parameters = [each for each in group["params"] if each.grad is not None]
        if not parameters:
            return
        lr, (take, keep) = group["lr"], group["betas"]
        gradients = [each.grad for each in parameters]
        means = [self._mean(each) for each in parameters]
        directions = torch._foreach_mul(means, take)
        torch._foreach_add_(directions, gradients, alpha=1 - take)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_add_(parameters, directions, alpha=-lr)
        torch._foreach_mul_(means, keep)
        torch._foreach_add_(means, gradients, alpha=1 - keep)

    def _mean(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
        mean: Tensor = state["exp_avg"]
        return mean
