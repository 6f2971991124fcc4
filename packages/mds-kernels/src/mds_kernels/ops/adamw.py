"""AdamW, by whichever fused implementation is there."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from mds_kernels.dispatch import implementation

__all__ = ["adamw", "adamw_reference"]


def adamw(
    parameters: Iterable[Tensor],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    backend: str | None = None,
) -> Optimizer:
    """Return an optimizer with decoupled weight decay that updates all parameters in few launches.

    Args:
        parameters: At least one tensor; their device and dtype choose the backend.
        lr: Learning rate, changed later through ``param_groups`` as with any torch optimizer.
        betas: Decay of the first and of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Share of a parameter, times ``lr``, that each step takes off.
        backend: The backend to use, or None for the registry's choice.
    """
    leaves = list(parameters)
    if not leaves:
        raise ValueError("adamw was given no parameters.")
    run = implementation(
        "adamw", device=leaves[0].device.type, dtype=leaves[0].dtype, backend=backend
    )
    optimizer: Optimizer = run(leaves, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    return optimizer


def adamw_reference(
    parameter: Tensor,
    gradients: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> Tensor:
    """Return a parameter in float64 after one step a gradient, by the formulas of the paper."""
    value = parameter.detach().double()
    first, second = torch.zeros_like(value), torch.zeros_like(value)
    for step, gradient in enumerate(gradients, start=1):
        wide = gradient.double()
        first = betas[0] * first + (1 - betas[0]) * wide
        second = betas[1] * second + (1 - betas[1]) * wide.square()
        unbiased = first / (1 - betas[0] ** step)
        root = (second / (1 - betas[1] ** step)).sqrt()
        value = value - lr * (unbiased / (root + eps) + weight_decay * value)
    return value
