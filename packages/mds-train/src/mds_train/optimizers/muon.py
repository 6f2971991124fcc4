"""Muon (Jordan et al. 2024) for the matrices of the layers, AdamW for everything else.

torch.optim.Muon steps whole matrices that lie on one rank, in bf16. Here a matrix may be cut over
ranks, flat or by rows and columns: `orthogonalize` is handed the update of every part and makes it
the same part of the orthogonalised matrix, so that every layout takes the steps of one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mds_train.optimizers.kinds import MATRICES

__all__ = ["Muon", "Orthogonalize", "orthogonalized", "step_scale"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # torch.optim.Muon's, and Jordan's
_ITERATIONS = 5
_EPSILON = 1e-7


class Orthogonalize(Protocol):
    """Replaces updates in place, together with the ranks that hold the other parts."""

    def __call__(self, stepped: Sequence[Tensor], updates: Sequence[Tensor]) -> None:
        """``updates[i]`` is that of ``stepped[i]``, a tensor that the optimizer steps."""


class Muon(torch.optim.AdamW):
    """Steps groups of kind "matrices" by Muon and the others by AdamW.

    A matrix moves by ``lr`` times the orthogonalised mean of its gradients (with Nesterov's look
    ahead), scaled so that its elements are as large as AdamW's steps are (Liu et al. 2025). So one
    learning rate and schedule serve both.

    Args:
        groups: Of `mds_train.optimizers.building`.
        lr: Learning rate.
        betas: AdamW's.
        eps: AdamW's.
        momentum: Decay of the mean of gradients of the matrices.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        for group in self.param_groups:
            if group["kind"] == MATRICES:
                group["momentum"] = momentum
        self._orthogonalize: Orthogonalize | None = None

    def use(self, orthogonalize: Orthogonalize) -> None:
        """Say how matrices are put together; before that a step changes nothing.

        DeepSpeed steps some optimizers once when it is built, without gradients.
        """
        self._orthogonalize = orthogonalize

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("Muon takes no closure: it looks at the gradients that are there.")
        if self._orthogonalize is None:
            return
        groups = self.param_groups
        for group in groups:
            if group["kind"] == MATRICES:
                self._step_matrices(group, self._orthogonalize)
        self.param_groups = [group for group in groups if group["kind"] != MATRICES]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _step_matrices(self, group: dict[str, Any], orthogonalize: Orthogonalize) -> None:
        stepped = [each for each in group["params"] if each.grad is not None]
        if not stepped:
            return
        momentum, gradients = group["momentum"], [each.grad for each in stepped]
        means = [self._mean(each) for each in stepped]
        torch._foreach_lerp_(means, gradients, 1 - momentum)
        updates = torch._foreach_lerp(gradients, means, momentum)
        orthogonalize(stepped, updates)
        torch._foreach_mul_(stepped, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(stepped, updates, alpha=-group["lr"])

    def _mean(self, stepped: Tensor) -> Tensor:
        state = self.state[stepped]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(stepped)
        mean: Tensor = state["momentum_buffer"]
        return mean


def step_scale(shape: Sequence[int]) -> float:
    """What makes a step of an orthogonal matrix as large as one of AdamW."""
    return 0.2 * math.sqrt(max(shape))


def orthogonalized(matrix: Tensor, *, dtype: torch.dtype) -> Tensor:
    """About the nearest orthogonal matrix, by five Newton-Schulz iterations.

    Args:
        matrix: [m, n].
        dtype: What is computed in: bfloat16 is what torch.optim.Muon takes; in float32 layouts
            differ no more than their gradients do.

    Returns:
        [m, n], of that dtype.
    """
    a, b, c = _COEFFICIENTS
    found = matrix.to(dtype)
    if matrix.shape[0] > matrix.shape[1]:
        found = found.T
    found = found / found.norm().clamp(min=_EPSILON)
    for _ in range(_ITERATIONS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if matrix.shape[0] > matrix.shape[1] else found
