"""Vocab-parallel cross-entropy of given logits, a chunk of tokens at a time, fp32 inside.

Letters: n tokens, v vocabulary, t tensor-parallel size.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from mds_kernels.backends.torch.graph_op import Packed, graph_op, ops_of, pack, unpack
from mds_kernels.backends.torch.vocabulary_softmax import (
    accumulation_dtype,
    check_labels,
    default_chunk,
    exponentials,
    gradient_of_logits,
    normalise,
    token_weights,
    working_block,
)
from mds_kernels.objective import Objective


def cross_entropy(
    logits: Tensor, labels: Tensor, *, objective: Objective, kernels: str = "torch"
) -> Tensor:
    """Return [n] losses of logits [n, v / t]."""
    return cast("Tensor", _CrossEntropy.apply(logits, labels, pack(objective), kernels))  # type: ignore[no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    """The backward pass needs the logits and two numbers a token, no second copy of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, packed: Packed, kernels: str) -> Tensor:
        forward = ops_of(kernels, "cross_entropy_forward")
        losses, statistics = forward(logits, labels, *packed)
        ctx.save_for_backward(logits, labels, statistics)
        ctx.packed, ctx.kernels = packed, kernels
        return cast("Tensor", losses)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        backward = ops_of(ctx.kernels, "cross_entropy_backward")
        return backward(grad_losses, *ctx.saved_tensors, *ctx.packed), None, None, None


def _fake_forward(logits: Tensor, labels: Tensor, *packed: object) -> tuple[Tensor, Tensor]:
    losses = logits.new_empty(logits.shape[0], dtype=accumulation_dtype(logits.dtype))
    return losses, losses.new_empty(2, logits.shape[0])


def _fake_backward(grad_losses: Tensor, logits: Tensor, *others: object) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


FAKES: dict[str, Callable[..., Any]] = {
    "cross_entropy_forward": _fake_forward,
    "cross_entropy_backward": _fake_backward,
}
"""Shapes of the results of each pass, for every backend."""


def _copies(
    logits: Tensor, rows: int, objective: Objective, *, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the tokens and a copy [c, r] of their logits, each in the same memory."""
    block = working_block(rows, objective, device=logits.device, dtype=dtype)
    size = objective.chunk_size or block or default_chunk(rows, logits.device)
    memory = logits.new_empty(min(size, logits.shape[0]), rows, dtype=dtype)
    for tokens in objective.chunks(logits.shape[0], default_size=size):
        own = logits[tokens, :rows]
        yield tokens, memory[: len(own)].copy_(own)


@graph_op("torch_cross_entropy_forward", fake=_fake_forward)
def _forward(
    logits: Tensor,
    labels: Tensor,
    whole: Sequence[int],
    real: Sequence[float],
    group_name: str,
) -> tuple[Tensor, Tensor]:
    objective = unpack(whole, real, group_name)
    check_labels(labels, objective)
    dtype = accumulation_dtype(logits.dtype)
    rows = objective.true_rows(logits.shape[1])
    losses = torch.empty(logits.shape[0], dtype=dtype, device=logits.device)
    statistics = losses.new_empty(2, logits.shape[0])
    for tokens, copy in _copies(logits, rows, objective, dtype=dtype):
        normalised = normalise(copy, labels[tokens], objective)
        losses[tokens] = normalised.losses
        statistics[:, tokens] = normalised.statistics
    return losses, statistics


@graph_op("torch_cross_entropy_backward", fake=_fake_backward)
def _backward(
    grad_losses: Tensor,
    logits: Tensor,
    labels: Tensor,
    statistics: Tensor,
    whole: Sequence[int],
    real: Sequence[float],
    group_name: str,
) -> Tensor:
    objective = unpack(whole, real, group_name)
    rows = objective.true_rows(logits.shape[1])
    weights = token_weights(labels, grad_losses, objective, like=statistics)
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    gradient[:, rows:] = 0
    for tokens, copy in _copies(logits, rows, objective, dtype=statistics.dtype):
        gradient[tokens, :rows] = gradient_of_logits(
            exponentials(copy, statistics[:, tokens]),
            labels[tokens],
            objective,
            statistics=statistics[:, tokens],
            weights=weights[tokens],
        )
    return gradient
