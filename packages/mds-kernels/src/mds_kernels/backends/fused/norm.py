"""Norms with an optional residual add in front.

Letters: n rows, h hidden.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mds_kernels.backends.torch.graph_op import ops_of


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    centred: bool,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    """Return the norm of ``x + residual`` [..., h] and that sum (``x`` itself without residual).

    Args:
        x: [..., h].
        residual: [..., h] or None.
        weight: [h].
        bias: [h] or None.
        eps: Added to the variance or to the mean of the squares.
        centred: A layer norm; else an RMS norm.
        kernels: The backend whose passes are used.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    added = None if residual is None else residual.reshape(rows.shape).contiguous()
    scale, shift = weight.contiguous(), None if bias is None else bias.contiguous()
    y, total = _Norm.apply(rows, added, scale, shift, eps, centred, kernels)  # type: ignore[no-untyped-call]
    return y.view(x.shape), x if residual is None else total.view(x.shape)


def one_dtype(*tensors: Tensor | None) -> bool:
    """Tell whether all tensors have one dtype, as compiled kernels need it."""
    return len({tensor.dtype for tensor in tensors if tensor is not None}) == 1


class _Norm(torch.autograd.Function):
    """Keeps the sum and two numbers a row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        centred: bool,  # noqa: FBT001 - autograd passes all arguments by place
        kernels: str,
    ) -> tuple[Tensor, Tensor]:
        forward = ops_of(kernels, "norm_forward")
        y, total, mean, rstd = forward(x, residual, weight, bias, eps, centred)
        ctx.save_for_backward(x if residual is None else total, weight, mean, rstd)
        ctx.centred, ctx.kernels = centred, kernels
        ctx.given = residual is not None, bias is not None
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_y: Tensor | None, grad_total: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        has_residual, has_bias = ctx.given
        nothing = (None,) * 3
        if grad_y is None:
            return grad_total, grad_total if has_residual else None, None, None, *nothing
        total, weight, mean, rstd = ctx.saved_tensors
        backward = ops_of(ctx.kernels, "norm_backward")
        # Without a residual the second result is not part of the graph.
        after = grad_total.contiguous() if has_residual and grad_total is not None else None
        grad_x, grad_weight, grad_bias = backward(
            grad_y.contiguous(), after, total, weight, mean, rstd, ctx.centred, has_bias
        )
        return (
            grad_x,
            grad_x if has_residual else None,
            grad_weight,
            grad_bias if has_bias else None,
            *nothing,
        )


def _fake_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = x.shape[0]
    statistics = torch.float32
    return (
        x.new_empty(x.shape),
        x.new_empty(0 if residual is None else x.shape),
        x.new_empty(rows if centred else 0, dtype=statistics),
        x.new_empty(rows, dtype=statistics),
    )


def _fake_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    centred: bool,  # noqa: FBT001
    with_bias: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        total.new_empty(total.shape),
        weight.new_empty(weight.shape),
        weight.new_empty(weight.shape if with_bias else 0),
    )


FAKES: dict[str, Callable[..., Any]] = {
    "norm_forward": _fake_forward,
    "norm_backward": _fake_backward,
}
"""Shapes of the results of each pass, for every backend."""
