"""The arithmetic of a chunk of tokens that reads 16-bit logits as they are: no fp32 copy of them.

It takes the place of the torch module of the same name in the chunked driver.

Letters: c tokens of a chunk, r true vocabulary rows of this rank.
"""

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from mds_kernels.backends.torch.vocabulary_softmax import (
    Normalised,
    losses_of,
    weights_of_parts,
)
from mds_kernels.backends.triton.kernels import vocabulary as kernels
from mds_kernels.backends.triton.launch import next_power_of_two, on_device_of
from mds_kernels.objective import Objective

BLOCK = 4096
WARPS = 8


def working_dtype(inputs: torch.dtype, _sums: torch.dtype) -> torch.dtype:
    """Return the dtype in which the logits are worked: as the matrix product makes them."""
    return inputs


def working_block(
    _rows: int, _objective: Objective, *, device: torch.device, dtype: torch.dtype
) -> int | None:
    """Return how many tokens' logits are worked at once: all of a chunk, in one launch."""
    return None


def normalise(logits: Tensor, labels: Tensor, objective: Objective) -> Normalised:
    """Compute the losses of a chunk; the logits [c, r] stay as they are.

    Args:
        logits: [c, r] true vocabulary only, rows of any stride.
        labels: [c] global ids.
        objective: What to compute.
    """
    parts = _own_statistics(logits, labels, objective)
    maxima = parts[0]
    if objective.group is not None:
        own, maxima = maxima, maxima.clone()
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=objective.group)
        parts = _relative_to(maxima, own, parts, logits.shape[1], labels, objective)
    totals = parts[1:]
    if objective.group is not None:
        dist.all_reduce(totals, group=objective.group)
    statistics = torch.stack([maxima, totals[0]])
    return Normalised(logits, statistics, losses_of(totals, maxima, labels, objective))


def exponentials(logits: Tensor, _statistics: Tensor) -> Tensor:
    """Return what ``gradient_of_logits`` takes: here the logits themselves."""
    return logits


def gradient_of_logits(
    logits: Tensor,
    labels: Tensor,
    objective: Objective,
    *,
    statistics: Tensor,
    weights: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Return the gradient of ``sum(weights * losses)``, in place of the logits or in ``out``.

    Args:
        logits: [c, r].
        labels: [c] global ids.
        objective: What was computed.
        statistics: [2, c].
        weights: [c], zero where ignored.
        out: [c, r] where to write; None: over the logits.
    """
    out = logits if out is None else out
    factor, share, push = weights_of_parts(weights, statistics, objective)
    tokens, rows = logits.shape
    if logits.numel():
        block = min(BLOCK, next_power_of_two(rows))
        with on_device_of(logits):
            kernels.gradient[(tokens, triton.cdiv(rows, block))](
                logits,
                labels.contiguous(),
                statistics[0].contiguous(),
                factor.contiguous(),
                share.contiguous(),
                push.contiguous(),
                out,
                logits.stride(0),
                out.stride(0),
                rows,
                objective.vocab_start,
                BLOCK=block,
                num_warps=WARPS,
            )
    return out


def _own_statistics(logits: Tensor, labels: Tensor, objective: Objective) -> Tensor:
    """Return [3 or 4, c] what the kernel writes, of this rank's rows."""
    tokens, rows = logits.shape
    count = 4 if objective.label_smoothing else 3
    if not logits.numel():  # no tokens, or a rank that holds padding only
        parts = logits.new_zeros(count, tokens, dtype=torch.float32)
        parts[0] = -torch.inf
        return parts
    parts = logits.new_empty(count, tokens, dtype=torch.float32)
    with on_device_of(logits):
        kernels.statistics[(tokens,)](
            logits,
            labels.contiguous(),
            parts,
            tokens,
            logits.stride(0),
            rows,
            objective.vocab_start,
            WANT_SUM=bool(objective.label_smoothing),
            BLOCK=min(BLOCK, next_power_of_two(rows)),
            num_warps=WARPS,
        )
    return parts


def _relative_to(
    maxima: Tensor, own: Tensor, parts: Tensor, rows: int, labels: Tensor, objective: Objective
) -> Tensor:
    """Return the parts relative to the largest logit of all ranks instead of this rank's."""
    if not rows:
        return parts
    shift = own - maxima
    here = (labels >= objective.vocab_start) & (labels < objective.vocab_start + rows)
    moved = [own, parts[1] * shift.exp(), (parts[2] + shift).masked_fill(~here, 0.0)]
    if objective.label_smoothing:
        moved.append(parts[3] + rows * shift)
    return torch.stack(moved)
