"""Vocab-parallel cross-entropy in plain torch, a chunk of tokens at a time, fp32 inside.

Letters: n tokens, c tokens of a chunk, h hidden, v vocabulary, t tensor-parallel size, r true vocabulary rows here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK_LOGITS = 1 << 24  # logits held at once; 64 MiB in fp32


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """Everything about the loss that is not a tensor."""

    vocab_start: int
    """First global id of this rank's rows."""
    vocab_size: int
    """The true vocabulary; rows from there on are padding."""
    group: dist.ProcessGroup | None
    label_smoothing: float
    z_loss: float
    ignore_index: int
    chunk_size: int | None

    def true_rows(self, rows: int) -> int:
        """Return how many of this rank's ``rows`` are no padding; those are its first ones."""
        return max(0, min(rows, self.vocab_size - self.vocab_start))

    def chunks(self, num_tokens: int, rows: int) -> Iterator[slice]:
        """Yield slices of tokens whose logits are never more than a chunk."""
        size = self.chunk_size or max(64, min(num_tokens, _CHUNK_LOGITS // max(1, rows)))
        for start in range(0, num_tokens, size):
            yield slice(start, start + size)


@dataclass(frozen=True, slots=True)
class Normalised:
    """A chunk after the forward arithmetic."""

    exponentials: Tensor
    """[c, r] exp(logit - max), in place of the logits."""
    sums: Tensor
    """[c] their sum over all ranks."""
    log_sum_exp: Tensor
    """[c] of the logits themselves."""
    losses: Tensor
    """[c] not weighted, zero where ignored."""


def normalise(logits: Tensor, labels: Tensor, objective: Objective) -> Normalised:
    """Compute the losses of a chunk and turn its logits into exponentials, in place.

    Args:
        logits: [c, r] fp32 or fp64, true vocabulary only; overwritten.
        labels: [c] global ids.
        objective: What to compute.
    """
    maxima = _row_maxima(logits)
    if objective.group is not None:
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=objective.group)
    logits.sub_(maxima[:, None])
    columns, here = _columns(labels, logits.shape[1], objective)
    target = _gather(logits, columns, here)
    totals = [target]
    if objective.label_smoothing:
        totals.append(logits.sum(dim=1))
    packed = torch.stack([logits.exp_().sum(dim=1), *totals])
    if objective.group is not None:
        dist.all_reduce(packed, group=objective.group)
    # The maximum cancels in the loss, so that it stays exact for logits of any size.
    log_sums = packed[0].log()
    losses = log_sums - packed[1]
    if objective.label_smoothing:
        uniform = log_sums - packed[2] / objective.vocab_size
        losses = torch.lerp(losses, uniform, objective.label_smoothing)
    log_sum_exp = log_sums + maxima
    if objective.z_loss:
        losses = losses + objective.z_loss * log_sum_exp.square()
    losses = losses.masked_fill(labels == objective.ignore_index, 0.0)
    return Normalised(logits, packed[0], log_sum_exp, losses)


def gradient_of_logits(
    exponentials: Tensor,
    labels: Tensor,
    objective: Objective,
    *,
    sums: Tensor,
    log_sum_exp: Tensor,
    weights: Tensor,
) -> Tensor:
    """Turn exponentials [c, r] into the gradient of ``sum(weights * losses)``, in place.

    Args:
        exponentials: exp(logit - something); overwritten.
        labels: [c] global ids.
        objective: What was computed.
        sums: [c] the sums of the exponentials over the whole vocabulary.
        log_sum_exp: [c].
        weights: [c], zero where ignored.
    """
    factor = weights
    if objective.z_loss:
        factor = weights * (1 + 2 * objective.z_loss * log_sum_exp)
    gradient = exponentials.mul_((factor / sums)[:, None])
    if objective.label_smoothing:
        gradient.sub_((weights * (objective.label_smoothing / objective.vocab_size))[:, None])
    if gradient.shape[1]:
        columns, here = _columns(labels, gradient.shape[1], objective)
        push = weights * (objective.label_smoothing - 1) * here
        gradient.scatter_add_(1, columns[:, None], push[:, None])
    return gradient


def token_weights(
    labels: Tensor, loss_weights: Tensor | None, objective: Objective, dtype: torch.dtype
) -> Tensor:
    """Return [n] weights in ``dtype``: the given ones or one, and zero where ignored."""
    counted = labels != objective.ignore_index
    if loss_weights is None:
        return counted.to(dtype)
    return loss_weights.to(dtype).masked_fill(~counted, 0.0)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64 and float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _row_maxima(logits: Tensor) -> Tensor:
    if logits.shape[1] == 0:  # a rank that holds padding only
        return logits.new_full((logits.shape[0],), -torch.inf)
    return logits.amax(dim=1)


def _columns(labels: Tensor, rows: int, objective: Objective) -> tuple[Tensor, Tensor]:
    """Return [c] the label's column on this rank (0 if elsewhere) and whether it is here."""
    columns = labels - objective.vocab_start
    here = (columns >= 0) & (columns < rows)
    return columns.masked_fill(~here, 0), here


def _gather(logits: Tensor, columns: Tensor, here: Tensor) -> Tensor:
    if logits.shape[1] == 0:
        return logits.new_zeros(logits.shape[0])
    return logits.gather(1, columns[:, None])[:, 0].masked_fill(~here, 0.0)


class CrossEntropy(torch.autograd.Function):
    """Losses of given logits; the backward pass needs the logits and one number a token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, objective: Objective) -> Tensor:
        """Return [n] losses of logits [n, v/t]."""
        dtype = accumulation_dtype(logits.dtype)
        rows = objective.true_rows(logits.shape[1])
        losses = torch.empty(logits.shape[0], dtype=dtype, device=logits.device)
        log_sum_exp = torch.empty_like(losses)
        for tokens in objective.chunks(logits.shape[0], rows):
            chunk = logits[tokens, :rows].to(dtype, copy=True)
            normalised = normalise(chunk, labels[tokens], objective)
            losses[tokens] = normalised.losses
            log_sum_exp[tokens] = normalised.log_sum_exp
        ctx.save_for_backward(logits, labels, log_sum_exp)
        ctx.objective = objective
        return losses

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the logits, in their dtype."""
        logits, labels, log_sum_exp = ctx.saved_tensors
        objective: Objective = ctx.objective
        rows = objective.true_rows(logits.shape[1])
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
        gradient[:, rows:] = 0
        weights = token_weights(labels, grad_losses, objective, grad_losses.dtype)
        for tokens in objective.chunks(logits.shape[0], rows):
            chunk = logits[tokens, :rows].to(weights.dtype, copy=True)
            chunk.sub_(log_sum_exp[tokens, None]).exp_()
            gradient[tokens, :rows] = gradient_of_logits(
                chunk,
                labels[tokens],
                objective,
                sums=torch.ones_like(weights[tokens]),
                log_sum_exp=log_sum_exp[tokens],
                weights=weights[tokens],
            )
        return gradient, None, None
