"""Masked softmax of attention scores that keeps only its result for the backward pass.

Letters: b micro batch, n heads, q query positions, k key positions.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from mds_kernels.backends.torch.graph_op import ops_of


def scaled_masked_softmax(
    scores: Tensor, mask: Tensor | None, *, scale: float, causal: bool, kernels: str
) -> Tensor:
    """Return the softmax of ``scale * scores`` [b, n, q, k] over the visible keys."""
    expanded = None if mask is None else mask.expand(scores.shape)
    return cast("Tensor", _Softmax.apply(scores.contiguous(), expanded, scale, causal, kernels))  # type: ignore[no-untyped-call]


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        mask: Tensor | None,
        scale: float,
        causal: bool,  # noqa: FBT001 - autograd passes all arguments by place
        kernels: str,
    ) -> Tensor:
        result = ops_of(kernels, "softmax_forward")(scores, mask, scale, causal)
        ctx.save_for_backward(result)
        ctx.scale, ctx.kernels = scale, kernels
        return cast("Tensor", result)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (result,) = ctx.saved_tensors
        grad_scores = ops_of(ctx.kernels, "softmax_backward")(
            gradient.contiguous(), result, ctx.scale
        )
        return grad_scores, None, None, None, None


def _fake_forward(scores: Tensor, *_: object) -> Tensor:
    return scores.new_empty(scores.shape)


def _fake_backward(gradient: Tensor, result: Tensor, scale: float) -> Tensor:
    return result.new_empty(result.shape)


FAKES: dict[str, Callable[..., Any]] = {
    "softmax_forward": _fake_forward,
    "softmax_backward": _fake_backward,
}
"""Shapes of the results of each pass, for every backend."""
