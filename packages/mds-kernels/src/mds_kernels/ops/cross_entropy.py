"""Cross-entropy of given logits whose vocabulary may be split over a process group.

Letters: n tokens, v vocabulary, t tensor-parallel size.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from mds_kernels.backends.torch.cross_entropy import CrossEntropy, Objective

__all__ = ["cross_entropy"]


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Return the loss of every token, differentiable.

    Args:
        logits: [n, v / t] this rank's columns.
        labels: [n] int64 global ids.
        vocab_start: First global id of this rank's columns.
        vocab_size: The true vocabulary (None: no column is padding); columns from there on do not take part.
        group: The ranks over which the vocabulary is split.
        label_smoothing: Mass spread evenly over the true vocabulary, as in ``torch.nn.functional.cross_entropy``.
        z_loss: Coefficient of the squared log-sum-exp that is added to each loss.
        ignore_index: Tokens with this label have loss and gradient zero.
        chunk_size: Tokens at a time.
        backend: None for the registry's choice.

    Returns:
        [n] fp32 (float64 for float64 logits).
    """
    objective = build_objective(
        labels,
        rows=logits.shape[1],
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        group=group,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        ignore_index=ignore_index,
        chunk_size=chunk_size,
    )
    losses: Tensor = CrossEntropy.apply(logits, labels, objective)
    return losses


def build_objective(
    labels: Tensor,
    *,
    rows: int,
    vocab_start: int,
    vocab_size: int | None,
    group: dist.ProcessGroup | None,
    label_smoothing: float,
    z_loss: float,
    ignore_index: int,
    chunk_size: int | None,
) -> Objective:
    """Check what the two public functions share and gather it."""
    if vocab_size is None:
        vocab_size = rows * (1 if group is None else group.size()) if group else vocab_start + rows
    if labels.device.type == "cpu" and labels.numel():
        wrong = labels[(labels != ignore_index) & ((labels < 0) | (labels >= vocab_size))]
        if wrong.numel():
            raise ValueError(
                f"label {wrong[0].item()} is outside the vocabulary of {vocab_size}; labels are global ids, and "
                f"ignored ones carry ignore_index ({ignore_index})."
            )
    return Objective(
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        group=group,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        ignore_index=ignore_index,
        chunk_size=chunk_size,
    )
