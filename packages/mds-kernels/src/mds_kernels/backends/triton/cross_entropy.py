"""Cross-entropy of given logits, all tokens in one launch each way.

Letters: n tokens, v vocabulary, t tensor-parallel size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mds_kernels.backends.torch import cross_entropy as shared
from mds_kernels.backends.torch.graph_op import unpack
from mds_kernels.backends.torch.vocabulary_softmax import check_labels, token_weights
from mds_kernels.backends.triton.launch import passes
from mds_kernels.backends.triton.vocabulary_softmax import gradient_of_logits, normalise
from mds_kernels.objective import Objective


def cross_entropy(logits: Tensor, labels: Tensor, *, objective: Objective) -> Tensor:
    """Return [n] losses of logits [n, v / t]."""
    return shared.cross_entropy(logits, labels, objective=objective, kernels="triton")


@passes(shared.FAKES)
def _cross_entropy_forward(
    logits: Tensor,
    labels: Tensor,
    whole: Sequence[int],
    real: Sequence[float],
    group_name: str,
) -> tuple[Tensor, Tensor]:
    objective = unpack(whole, real, group_name)
    check_labels(labels, objective)
    rows = objective.true_rows(logits.shape[1])
    normalised = normalise(_by_token(logits)[:, :rows], labels, objective)
    return normalised.losses, normalised.statistics


@passes(shared.FAKES)
def _cross_entropy_backward(
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
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    gradient[:, rows:] = 0
    gradient_of_logits(
        _by_token(logits)[:, :rows],
        labels,
        objective,
        statistics=statistics,
        weights=token_weights(labels, grad_losses, objective, like=statistics),
        out=gradient[:, :rows],
    )
    return gradient


def _by_token(logits: Tensor) -> Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()
