"""Cross-entropy of given logits whose vocabulary may be split over a process group.

Letters: n tokens, v vocabulary, t tensor-parallel size.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mds_kernels.dispatch import implementation
from mds_kernels.objective import build_objective

__all__ = ["cross_entropy", "cross_entropy_reference"]


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

    The logits are read, never changed, so they may be used elsewhere too.

    Args:
        logits: [n, v / t] this rank's columns.
        labels: [n] int64 global ids.
        vocab_start: First global id of this rank's columns.
        vocab_size: The true vocabulary; columns from there on are padding and take no part.
            None: no column is padding.
        group: The ranks over which the vocabulary is split; a collective call for all of them.
        label_smoothing: Mass spread evenly over the true vocabulary, as in
            ``torch.nn.functional.cross_entropy``.
        z_loss: Coefficient of the squared log-sum-exp that is added to each loss.
        ignore_index: Tokens with this label have loss and gradient zero.
        chunk_size: Tokens at a time; None for a choice by the size of the vocabulary.
        backend: The backend to use, or None for the registry's choice.

    Returns:
        [n] fp32 (float64 for float64 logits).

    Raises:
        ValueError: Shapes don't fit, or (on a CPU) a label is outside the vocabulary.
        BackendError: The backend asked for can't be used.
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"logits must be [n, v / t] and labels [n]; got {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}. Flatten the batch and sequence dimensions first."
        )
    check_label_dtype(labels)
    objective = build_objective(
        rows=logits.shape[1],
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        group=group,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        ignore_index=ignore_index,
        chunk_size=chunk_size,
    )
    run = implementation(
        "cross_entropy", device=logits.device.type, dtype=logits.dtype, backend=backend
    )
    losses: Tensor = run(logits, labels, objective=objective)
    return losses


def check_label_dtype(labels: Tensor) -> None:
    """Raise unless labels are int64, the one integer type that torch can gather by."""
    if labels.dtype != torch.int64:
        raise ValueError(f"labels are {labels.dtype}; they must be int64: labels.long().")


def cross_entropy_reference(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
) -> Tensor:
    """Return [n] float64 losses of whole logits [n, v], computed in the plainest way."""
    true = logits.double()[:, :vocab_size]
    losses = F.cross_entropy(
        true,
        labels,
        reduction="none",
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
    )
    return losses + z_loss * true.logsumexp(dim=1).square() * (labels != ignore_index)
