"""Rows sorted by expert and back, with gathers in both directions: no atomics, no float scatter.

Sorting is torch's; the three passes over the rows (spread, gather, dot) are graph ops that other
backends have too, and the autograd functions here serve them all.

Letters: n tokens, k experts a token, h hidden, e experts.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from mds_kernels.backends.torch.graph_op import graph_op, ops_of


def moe_permute(
    x: Tensor, experts: Tensor, *, num_experts: int, kernels: str = "torch"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows [n k, h], rows per expert [e], and positions [n, k]."""
    order, positions, counts = _sort(experts, num_experts)
    rows = cast("Tensor", _Permute.apply(x, order, positions, kernels))  # type: ignore[no-untyped-call]
    return rows, counts, positions


def moe_unpermute(
    rows: Tensor, positions: Tensor, probabilities: Tensor | None, *, kernels: str = "torch"
) -> Tensor:
    """Return [n, h] the weighted sum of each token's rows."""
    return cast("Tensor", _Unpermute.apply(rows, positions, probabilities, kernels))  # type: ignore[no-untyped-call]


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, positions: Tensor, kernels: str) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.kernels = kernels
        return cast("Tensor", ops_of(kernels, "spread")(x, order, positions.shape[1], None))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (positions,) = ctx.saved_tensors
        return ops_of(ctx.kernels, "gather")(gradient, positions, None), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, positions: Tensor, probabilities: Tensor | None, kernels: str
    ) -> Tensor:
        # Without probabilities the gradient needs no rows, which are large.
        wanted = probabilities is not None and probabilities.requires_grad
        ctx.save_for_backward(rows if wanted else None, positions, probabilities)
        ctx.kernels = kernels
        return cast("Tensor", ops_of(kernels, "gather")(rows, positions, probabilities))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, positions, probabilities = ctx.saved_tensors
        grad_rows = grad_probabilities = None
        if ctx.needs_input_grad[0]:
            order = _inverse(positions)
            spread = ops_of(ctx.kernels, "spread")
            grad_rows = spread(gradient, order, positions.shape[1], probabilities)
        if ctx.needs_input_grad[2]:
            products = ops_of(ctx.kernels, "dot")(gradient, rows, positions)
            grad_probabilities = products.to(probabilities.dtype)
        return grad_rows, None, grad_probabilities, None


def _sort(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return order [n k] (which slot each row comes from), positions [n, k], rows per expert."""
    _check_experts(experts, num_experts)
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    counts = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))
    return order, _inverse(order).view(experts.shape), counts


def _inverse(permutation: Tensor) -> Tensor:
    """Return the inverse [n k] of a permutation of any shape; no two writes meet."""
    flat = permutation.flatten()
    numbers = torch.arange(flat.numel(), device=flat.device)
    return torch.empty_like(flat).scatter_(0, flat, numbers)


def _check_experts(experts: Tensor, num_experts: int) -> None:
    if experts.device.type != "cpu" or torch.compiler.is_compiling() or not experts.numel():
        return
    low, high = int(experts.min()), int(experts.max())
    if low < 0 or high >= num_experts:
        raise ValueError(
            f"experts has the number {low if low < 0 else high}; there are {num_experts} experts, "
            f"numbered from 0. No slot can be left empty: give it a probability of zero."
        )


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _fake_spread(x: Tensor, order: Tensor, *_: object) -> Tensor:
    return x.new_empty(order.shape[0], x.shape[1])


def _fake_gather(rows: Tensor, positions: Tensor, *_: object) -> Tensor:
    return rows.new_empty(positions.shape[0], rows.shape[1])


def _fake_dot(gradient: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    return gradient.new_empty(positions.shape, dtype=_wide(gradient))


FAKES: dict[str, Callable[..., Any]] = {
    "spread": _fake_spread,
    "gather": _fake_gather,
    "dot": _fake_dot,
}
"""Shapes of the results of each pass, for every backend."""


@graph_op("torch_spread", fake=_fake_spread)
def _spread(x: Tensor, order: Tensor, choices: int, probabilities: Tensor | None) -> Tensor:
    """Return [n k, h] row i: that of slot ``order[i]``'s token, times the slot's probability."""
    rows = x[order // choices]
    if probabilities is None:
        return rows
    scale = probabilities.flatten()[order].to(_wide(x))
    return (rows * scale[:, None]).to(x.dtype)


@graph_op("torch_gather", fake=_fake_gather)
def _gather(rows: Tensor, positions: Tensor, probabilities: Tensor | None) -> Tensor:
    """Return [n, h] the sum over k of ``rows[positions] * probabilities``, in fp32 inside."""
    total = rows.new_zeros(positions.shape[0], rows.shape[1], dtype=_wide(rows))
    for choice in range(positions.shape[1]):  # one [n, h] at a time, not [n, k, h] in fp32
        picked = rows[positions[:, choice]].to(total.dtype)
        if probabilities is None:
            total += picked
        else:
            total.addcmul_(picked, probabilities[:, choice, None].to(total.dtype))
    return total.to(rows.dtype)


@graph_op("torch_dot", fake=_fake_dot)
def _dot(gradient: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """Return [n, k] the products of a token's gradient with each of its rows."""
    wide = gradient.to(_wide(gradient))
    columns = [
        (wide * rows[positions[:, choice]]).sum(dim=1) for choice in range(positions.shape[1])
    ]
    return torch.stack(columns, dim=1) if columns else wide.new_empty(positions.shape)
