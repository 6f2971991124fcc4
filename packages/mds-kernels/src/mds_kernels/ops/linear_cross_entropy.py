"""Output projection and cross-entropy in one op, so that the logits never exist as a whole.

Letters: n tokens, h hidden, v vocabulary, t tensor-parallel size.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mds_kernels.backends.torch.linear_cross_entropy import LinearCrossEntropyFunction
from mds_kernels.ops.cross_entropy import build_objective

__all__ = ["LinearCrossEntropy", "linear_cross_entropy"]


class LinearCrossEntropy(NamedTuple):
    """What ``linear_cross_entropy`` returns."""

    loss_sum: Tensor
    """Scalar, ``sum(loss_weights * losses)``, differentiable; fp32 (float64 for float64 inputs)."""
    losses: Tensor
    """[n] losses of the tokens, not weighted, detached."""


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
    backend: str | None = None,
) -> LinearCrossEntropy:
    """Return the summed loss of ``hidden @ weight.T`` against ``labels`` and the loss of every token.

    Args:
        hidden: [n, h], the same on all ranks of the group.
        weight: [v / t, h] this rank's rows.
        labels: [n] int64 global ids.
        loss_weights: [n] (None: ones); ignored labels weigh nothing.
        vocab_start: First global id of this rank's rows.
        vocab_size: The true vocabulary (None: no row is padding); rows from there on do not take part.
        group: The ranks over which the vocabulary is split. The gradient of ``hidden`` is this rank's part of the sum.
        label_smoothing: Mass spread evenly over the true vocabulary, as in ``torch.nn.functional.cross_entropy``.
        z_loss: Coefficient of the squared log-sum-exp that is added to each loss.
        ignore_index: Tokens with this label have loss and gradient zero.
        chunk_size: Tokens at a time.
        backend: None for the registry's choice.
    """
    objective = build_objective(
        labels,
        rows=weight.shape[0],
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        group=group,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        ignore_index=ignore_index,
        chunk_size=chunk_size,
    )
    training = torch.is_grad_enabled()
    needs = (training and hidden.requires_grad, training and weight.requires_grad)
    return LinearCrossEntropy(
        *LinearCrossEntropyFunction.apply(hidden, weight, labels, loss_weights, objective, needs)
    )
