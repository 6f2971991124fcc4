"""Masked softmax of attention scores that keeps only its result for the backward pass.

Letters: q query positions, k key positions.
"""

from typing import Any, cast

import torch
from torch import Tensor

aten = torch.ops.aten


def scaled_masked_softmax(
    scores: Tensor, mask: Tensor | None, *, scale: float, causal: bool
) -> Tensor:
    """Return the softmax of ``scale * scores`` [..., q, k] over the visible keys."""
    hidden = _hidden(scores, mask, causal=causal)
    if torch.compiler.is_compiling():
        return _softmax(scores, hidden, scale)
    return cast("Tensor", _ScaledMaskedSoftmax.apply(scores, hidden, scale))  # type: ignore[no-untyped-call]


class _ScaledMaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
        probabilities = _softmax(scores, hidden, scale)
        ctx.save_for_backward(probabilities)
        ctx.scale = scale
        return probabilities

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (probabilities,) = ctx.saved_tensors
        grad_scores = aten._softmax_backward_data(gradient, probabilities, -1, probabilities.dtype)
        return grad_scores.mul_(ctx.scale), None, None


def _hidden(scores: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor | None:
    """Return which keys are hidden, broadcastable to the scores."""
    if not causal:
        return mask
    queries, keys = scores.shape[-2:]
    later = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
    later = later.triu(diagonal=keys - queries + 1)
    return later if mask is None else mask | later


def _softmax(scores: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
    dtype = torch.promote_types(scores.dtype, torch.float32)
    # The scale in fp32: in 16 bits it would round every score once more.
    scaled = scores.to(dtype) * scale
    if hidden is None:
        return scaled.softmax(dim=-1).to(scores.dtype)
    probabilities = scaled.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    # A row without a visible key is 0 / 0; its probabilities are zero, and so are its gradients.
    return probabilities.masked_fill(hidden, 0.0).to(scores.dtype)
