"""How far a student's next-token probabilities are from a teacher's, a chunk of tokens at a time.

``T^2 KL(teacher || student)`` of both softened by the temperature T (Hinton et al. 2015), over a
vocabulary that tensor-parallel ranks share: they exchange two maxima and three sums a token, never
logits. The gradients are computed while a chunk's logits are at hand, as the fused cross-entropy
does.

Shapes: ``n`` tokens, ``c`` tokens of a chunk, ``h`` hidden of the student, ``k`` of the teacher,
``v`` vocabulary, ``t`` tensor-parallel size, ``r`` true vocabulary rows of this rank.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["Divergence", "Prediction", "linear_divergence"]

_CHUNK = 512


class Prediction(NamedTuple):
    """What logits are the product of."""

    hidden: Tensor
    """[n, h]."""
    weight: Tensor
    """[v / t, h], this rank's rows of the head."""


class Divergence(NamedTuple):
    """What `linear_divergence` gives."""

    loss_sum: Tensor
    """Scalar, the weighted sum over the tokens, differentiable; fp32, or float64."""
    losses: Tensor
    """[n], not weighted, detached."""


def linear_divergence(
    student: Prediction,
    teacher: Prediction,
    *,
    temperature: float,
    loss_weights: Tensor | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    group: ProcessGroup | None = None,
    chunk_size: int = _CHUNK,
) -> Divergence:
    """Compare a student with a teacher that learns nothing.

    Args:
        student: Of which gradients are wanted; that of its hidden states is a partial sum over the
            group.
        teacher: Of the same tokens, with as many rows of the vocabulary on each rank.
        temperature: Divides the logits of both.
        loss_weights: [n] weight of each token; ones if None.
        vocab_start: First id of this rank's rows.
        vocab_size: The true vocabulary, without rows of padding; all rows if None.
        group: Ranks that share the vocabulary.
        chunk_size: Tokens whose logits exist at a time.
    """
    rows = student.weight.shape[0]
    size = 1 if group is None else group.size()
    vocab_size = rows * size if vocab_size is None else vocab_size
    true_rows = min(max(vocab_size - vocab_start, 0), rows)
    found = _Divergence.apply(  # type: ignore[no-untyped-call]
        *student,
        *(tensor.detach() for tensor in teacher),
        loss_weights,
        (temperature, true_rows, chunk_size, group),
    )
    return Divergence(*found)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        loss_weights: Tensor | None,
        options: tuple[float, int, int, ProcessGroup | None],
    ) -> tuple[Tensor, Tensor]:
        temperature, rows, chunk, group = options
        wide = torch.promote_types(hidden.dtype, torch.float32)
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        losses = hidden.new_empty(hidden.shape[0], dtype=wide)
        weights = torch.ones_like(losses) if loss_weights is None else loss_weights.to(wide)
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if want_weight else None
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            ours = _logits(hidden[part], weight[:rows], temperature)
            theirs = _logits(teacher_hidden[part], teacher_weight[:rows], temperature)
            divergence, gradient = _compare(ours, theirs, group=group)
            losses[part] = temperature**2 * divergence
            if not (want_hidden or want_weight):
                continue
            gradient *= temperature * weights[part, None]
            narrow = gradient.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = narrow @ weight[:rows]
            if grad_weight is not None:
                grad_weight[:rows] += (narrow.T @ hidden[part]).to(wide)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None if grad_hidden is None else (grad_hidden * grad_loss).to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * grad_loss).to(ctx.weight_dtype),
            *(None,) * 4,
        )


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """[c, r] in fp32 or float64, divided by the temperature."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return (hidden @ weight.T).to(wide) / temperature


def _compare(ours: Tensor, theirs: Tensor, *, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """KL(theirs || ours) [c] of logits [c, r], and its gradient by ours; overwrites both."""
    maxima = torch.stack([_largest(ours), _largest(theirs)])
    if group is not None:
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    ours -= maxima[0, :, None]
    theirs -= maxima[1, :, None]
    p, q = ours.exp(), theirs.exp()
    sums = torch.stack([p.sum(1), q.sum(1), (q * (theirs - ours)).sum(1)])
    if group is not None:
        dist.all_reduce(sums, group=group)
    divergence = sums[2] / sums[1] + sums[0].log() - sums[1].log()
    return divergence, p.div_(sums[0, :, None]).sub_(q.div_(sums[1, :, None]))


def _largest(logits: Tensor) -> Tensor:
    """[c] maxima; a rank may have padding only."""
    if logits.shape[1] == 0:
        return logits.new_full((logits.shape[0],), -math.inf)
    return logits.amax(1)
