"""Output projection and cross-entropy in one op, so that the logits never exist as a whole.

Letters: n tokens, h hidden, v vocabulary, t tensor-parallel size.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mds_kernels.dispatch import implementation
from mds_kernels.objective import build_objective
from mds_kernels.ops.cross_entropy import check_label_dtype, cross_entropy_reference

__all__ = ["LinearCrossEntropy", "linear_cross_entropy", "linear_cross_entropy_reference"]


class LinearCrossEntropy(NamedTuple):
    """What ``linear_cross_entropy`` returns."""

    loss_sum: Tensor
    """Scalar ``sum(loss_weights * losses)``, differentiable; fp32 (float64 for float64 inputs)."""
    losses: Tensor
    """[n] losses of the tokens, not weighted, detached, in the same dtype."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    loss_weights: Tensor | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    recompute: bool | None = None,
    backend: str | None = None,
) -> LinearCrossEntropy:
    """Return the summed loss of ``hidden @ weight.T`` against ``labels``, and each token's loss.

    Args:
        hidden: [n, h], the same on all ranks of the group. Its gradient is this rank's part of a
            sum over the group, which the caller takes.
        weight: [v / t, h] this rank's rows, in the dtype of ``hidden`` (autocast sees to that).
        labels: [n] int64 global ids.
        loss_weights: [n] weights of the tokens, without gradient; None: ones. Ignored labels weigh
            nothing.
        vocab_start: First global id of this rank's rows.
        vocab_size: The true vocabulary; rows from there on are padding and take no part.
            None: no row is padding.
        group: The ranks over which the vocabulary is split; a collective call for all of them.
        label_smoothing: Mass spread evenly over the true vocabulary, as in
            ``torch.nn.functional.cross_entropy``.
        z_loss: Coefficient of the squared log-sum-exp that is added to each loss.
        ignore_index: Tokens with this label have loss and gradient zero.
        chunk_size: Tokens at a time; None for a choice by the size of the vocabulary.
        recompute: False computes the gradients in the forward pass. True keeps two numbers a token
            and makes the logits again in the backward pass: for a backward pass split in two (call
            it with ``weight.detach()`` and with ``hidden.detach()``), or when many micro batches
            wait for theirs. None: True for float16, whose gradients must carry the loss scale
            before they are rounded, else False.
        backend: The backend to use, or None for the registry's choice.

    Raises:
        ValueError: Shapes or dtypes don't fit, or (on a CPU) a label is outside the vocabulary.
        BackendError: The backend asked for can't be used.
    """
    hidden, weight = _autocast(hidden, weight)
    _check(hidden, weight, labels, loss_weights)
    objective = build_objective(
        rows=weight.shape[0],
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        group=group,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        ignore_index=ignore_index,
        chunk_size=chunk_size,
    )
    run = implementation(
        "linear_cross_entropy", device=hidden.device.type, dtype=hidden.dtype, backend=backend
    )
    if recompute is None:
        recompute = hidden.dtype == torch.float16
    return LinearCrossEntropy(
        *run(hidden, weight, labels, loss_weights, objective=objective, recompute=recompute)
    )


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    loss_weights: Tensor | None = None,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
) -> LinearCrossEntropy:
    """Return the same from whole float64 logits of a whole vocabulary, in the plainest way."""
    losses = cross_entropy_reference(
        hidden.double() @ weight.double().T,
        labels,
        vocab_size=vocab_size,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        ignore_index=ignore_index,
    )
    weights = torch.ones_like(losses) if loss_weights is None else loss_weights.double()
    return LinearCrossEntropy((losses * weights).sum(), losses.detach())


def _autocast(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Cast as autocast casts the inputs of a matrix product, which this op contains."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device):
        return hidden, weight
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype)


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, loss_weights: Tensor | None) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be [n, h] and weight [v / t, h]; got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}. Flatten the batch and sequence dimensions first."
        )
    for name, tensor in (("labels", labels), ("loss_weights", loss_weights)):
        if tensor is not None and tensor.shape != hidden.shape[:1]:
            raise ValueError(
                f"{name} must be [n] with n = {hidden.shape[0]} as in hidden; got "
                f"{tuple(tensor.shape)}."
            )
    check_label_dtype(labels)
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}; cast one of them, or call under "
            f"torch.autocast."
        )
    if loss_weights is not None and loss_weights.requires_grad:
        raise ValueError("loss_weights gets no gradient here; detach it, or weigh cross_entropy().")
