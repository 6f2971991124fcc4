"""The arithmetic that both vocabulary losses share: a chunk of tokens, over all ranks.

Letters: n tokens, c tokens of a chunk, r true vocabulary rows of this rank.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mds_kernels.objective import Objective

# Logits held at once: 128 MiB of fp32 on a CPU, where the gradient of a 50k vocabulary is larger
# anyway; twice that elsewhere. Too few tokens a chunk, and the matrix products become slow.
_CHUNK_LOGITS = {"cpu": 1 << 25, "other": 1 << 26}
# Logits that are worked at once: what a core's own cache holds, through which they go seven times.
_CACHED_BYTES = 1 << 21


@dataclass(frozen=True, slots=True)
class Normalised:
    """A chunk after the forward arithmetic."""

    exponentials: Tensor
    """[c, r] exp(logit - largest logit), in place of the logits."""
    statistics: Tensor
    """[2, c] the largest logit over all ranks, and the sum of the exponentials."""
    losses: Tensor
    """[c] not weighted, zero where ignored."""


def working_dtype(_inputs: torch.dtype, sums: torch.dtype) -> torch.dtype:
    """Return the dtype in which the logits are worked, in place: that of the sums over them."""
    return sums


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
    parts = [_target(logits, labels, objective)]
    if objective.label_smoothing:
        parts.append(logits.sum(dim=1))
    # One message a chunk for all sums over the vocabulary.
    totals = torch.stack([logits.exp_().sum(dim=1), *parts])
    if objective.group is not None:
        dist.all_reduce(totals, group=objective.group)
    losses = losses_of(totals, maxima, labels, objective)
    return Normalised(logits, torch.stack([maxima, totals[0]]), losses)


def exponentials(logits: Tensor, statistics: Tensor) -> Tensor:
    """Make the exponentials again from logits [c, r], in place.

    Args:
        logits: [c, r], overwritten.
        statistics: [2, c]. Kept apart rather than as one log-sum-exp, which for logits of 1e4
            would round the probabilities to three digits.
    """
    return logits.sub_(statistics[0, :, None]).exp_()


def gradient_of_logits(
    exponentials: Tensor,
    labels: Tensor,
    objective: Objective,
    *,
    statistics: Tensor,
    weights: Tensor,
) -> Tensor:
    """Turn exponentials [c, r] into the gradient of ``sum(weights * losses)``, in place.

    Args:
        exponentials: [c, r], overwritten.
        labels: [c] global ids.
        objective: What was computed.
        statistics: [2, c].
        weights: [c], zero where ignored.
    """
    factor, share, push = weights_of_parts(weights, statistics, objective)
    gradient = exponentials.mul_(factor[:, None])
    if objective.label_smoothing:
        gradient.sub_(share[:, None])
    if gradient.shape[1]:
        columns, here = _columns(labels, gradient.shape[1], objective)
        gradient.scatter_add_(1, columns[:, None], (push * here)[:, None])
    return gradient


def weights_of_parts(
    weights: Tensor, statistics: Tensor, objective: Objective
) -> tuple[Tensor, Tensor, Tensor]:
    """Return [c] what the gradient is made of.

    Args:
        weights: [c].
        statistics: [2, c].
        objective: What was computed.

    Returns:
        The factor of the exponentials, the share that every row is pushed down, and what the
        label's row gets on top.
    """
    maxima, sums = statistics
    factor = weights / sums
    if objective.z_loss:
        factor = factor * (1 + 2 * objective.z_loss * (maxima + sums.log()))
    share = weights * (objective.label_smoothing / objective.vocab_size)
    return factor, share, weights * (objective.label_smoothing - 1)


def token_weights(
    labels: Tensor, given: Tensor | None, objective: Objective, *, like: Tensor
) -> Tensor:
    """Return [n] weights in the dtype of ``like``: the given ones or one, zero where ignored."""
    counted = labels != objective.ignore_index
    if given is None:
        return counted.to(like.dtype)
    return given.to(like.dtype).masked_fill(~counted, 0.0)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64 and float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def default_chunk(rows: int, device: torch.device) -> int:
    """Return how many tokens' logits over ``rows`` of the vocabulary are held at once."""
    logits = _CHUNK_LOGITS["cpu" if device.type == "cpu" else "other"]
    # A power of two: with 333 tokens a CPU's bf16 products take twice the time of 256.
    return power_of_two_below(max(64, logits // max(1, rows)))


def working_block(
    rows: int, objective: Objective, *, device: torch.device, dtype: torch.dtype
) -> int | None:
    """Return how many tokens' logits are worked at once; None for all of a chunk.

    Args:
        rows: True vocabulary rows of this rank.
        objective: What to compute.
        device: Where.
        dtype: In which the logits are worked.
    """
    # Every block would be a message to the group, and a launch of each step elsewhere.
    if objective.group is not None or device.type != "cpu":
        return None
    return max(1, _CACHED_BYTES // (max(1, rows) * dtype.itemsize))


def power_of_two_below(number: int) -> int:
    """Return the largest power of two that is not above a positive number."""
    return 1 << (int(number).bit_length() - 1)


def check_labels(labels: Tensor, objective: Objective) -> None:
    """Raise if a label is no id of the vocabulary; only on a CPU, elsewhere it would stall.

    Raises:
        ValueError: Naming the first wrong label.
    """
    if labels.device.type != "cpu":
        return
    wrong = labels[_is_wrong(labels, objective)]
    if wrong.numel():
        raise ValueError(
            f"label {wrong[0].item()} is outside the vocabulary of {objective.vocab_size}; labels "
            f"are global ids, and tokens without one carry ignore_index ({objective.ignore_index})."
        )


def losses_of(totals: Tensor, maxima: Tensor, labels: Tensor, objective: Objective) -> Tensor:
    """Return [c] losses from sums over the vocabulary; ignored tokens have none.

    Args:
        totals: [2 or 3, c] sum of the exponentials, the label's logit and, for label smoothing, the
            sum of the logits, all relative to the largest.
        maxima: [c] the largest logit.
        labels: [c] global ids.
        objective: What to compute.
    """
    # Both terms are relative to the largest logit, so the loss stays exact for logits of any size.
    log_sums = totals[0].log()
    losses = log_sums - totals[1]
    if objective.label_smoothing:
        uniform = log_sums - totals[2] / objective.vocab_size
        losses = torch.lerp(losses, uniform, objective.label_smoothing)
    if objective.z_loss:
        losses = losses + objective.z_loss * (log_sums + maxima).square()
    return _mark(losses, labels, objective)


def _mark(losses: Tensor, labels: Tensor, objective: Objective) -> Tensor:
    """Give ignored tokens no loss, and wrong labels one that can't be overlooked."""
    losses = losses.masked_fill(_is_wrong(labels, objective), torch.nan)
    return losses.masked_fill(labels == objective.ignore_index, 0.0)


def _is_wrong(labels: Tensor, objective: Objective) -> Tensor:
    outside = (labels < 0) | (labels >= objective.vocab_size)
    return outside & (labels != objective.ignore_index)


def _row_maxima(logits: Tensor) -> Tensor:
    if logits.shape[1] == 0:  # a rank that holds padding only
        return logits.new_full((logits.shape[0],), -torch.inf)
    return logits.amax(dim=1)


def _target(logits: Tensor, labels: Tensor, objective: Objective) -> Tensor:
    """Return [c] the label's logit where it is on this rank, else zero."""
    if logits.shape[1] == 0:
        return logits.new_zeros(logits.shape[0])
    columns, here = _columns(labels, logits.shape[1], objective)
    return logits.gather(1, columns[:, None])[:, 0].masked_fill(~here, 0.0)


def _columns(labels: Tensor, rows: int, objective: Objective) -> tuple[Tensor, Tensor]:
    """Return [c] the label's column on this rank (0 if elsewhere) and whether it is here."""
    columns = labels - objective.vocab_start
    here = (columns >= 0) & (columns < rows)
    return columns.masked_fill(~here, 0), here
