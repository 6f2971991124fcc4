"""Masked softmax of attention scores in one launch each way, of any length.

Letters: b micro batch, n heads, q query positions, k key positions.
"""

import torch
from torch import Tensor

from mds_kernels.backends.fused.softmax import FAKES
from mds_kernels.backends.fused.softmax import scaled_masked_softmax as with_gradient
from mds_kernels.backends.triton.kernels.softmax import softmax_backward, softmax_forward
from mds_kernels.backends.triton.launch import next_power_of_two, on_device_of, passes

BLOCK = 2048


def scaled_masked_softmax(
    scores: Tensor, mask: Tensor | None, *, scale: float, causal: bool
) -> Tensor:
    """Return the softmax of ``scale * scores`` [b, n, q, k] over the visible keys."""
    return with_gradient(scores, mask, scale=scale, causal=causal, kernels="triton")


@passes(FAKES)
def _softmax_forward(
    scores: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,  # noqa: FBT001 - a graph op's arguments are positional
) -> Tensor:
    result = scores.new_empty(scores.shape)
    heads, queries, keys = scores.shape[1:]
    hidden = scores if mask is None else mask.view(torch.uint8)
    if scores.numel():
        with on_device_of(scores):
            softmax_forward[(scores.numel() // keys,)](
                scores,
                hidden,
                result,
                heads,
                queries,
                keys,
                *hidden.stride(),
                scale,
                CAUSAL=causal,
                MASKED=mask is not None,
                BLOCK=min(BLOCK, next_power_of_two(keys)),
            )
    return result


@passes(FAKES)
def _softmax_backward(gradient: Tensor, result: Tensor, scale: float) -> Tensor:
    grad_scores = result.new_empty(result.shape)
    keys = result.shape[-1]
    if result.numel():
        with on_device_of(result):
            softmax_backward[(result.numel() // keys,)](
                gradient,
                result,
                grad_scores,
                keys,
                scale,
                BLOCK=min(BLOCK, next_power_of_two(keys)),
            )
    return grad_scores
