"""Output projection and cross-entropy in one, in plain torch: the logits exist a chunk at a time.

Letters: n tokens, c tokens of a chunk, h hidden, v vocabulary, t tensor-parallel size, r true vocabulary rows here.
"""

from typing import Any

import torch
from torch import Tensor

from mds_kernels.backends.torch.cross_entropy import (
    Objective,
    accumulation_dtype,
    gradient_of_logits,
    normalise,
    token_weights,
)


class LinearCrossEntropyFunction(torch.autograd.Function):
    """Computes the gradients beside the loss, while a chunk's logits are at hand."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        loss_weights: Tensor | None,
        objective: Objective,
        needs_gradient: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the losses and the losses [n]."""
        dtype = accumulation_dtype(hidden.dtype)
        rows = objective.true_rows(weight.shape[0])
        weights = token_weights(labels, loss_weights, objective, dtype)
        losses = torch.empty(hidden.shape[0], dtype=dtype, device=hidden.device)
        grad_hidden = (
            torch.empty_like(hidden, memory_format=torch.contiguous_format)
            if needs_gradient[0]
            else None
        )
        grad_weight = (
            torch.zeros(weight.shape, dtype=dtype, device=weight.device)
            if needs_gradient[1]
            else None
        )
        for tokens in objective.chunks(hidden.shape[0], rows):
            logits = (hidden[tokens] @ weight[:rows].T).to(dtype)
            normalised = normalise(logits, labels[tokens], objective)
            losses[tokens] = normalised.losses
            if grad_hidden is None and grad_weight is None:
                continue
            gradient = gradient_of_logits(
                normalised.exponentials,
                labels[tokens],
                objective,
                sums=normalised.sums,
                log_sum_exp=normalised.log_sum_exp,
                weights=weights[tokens],
            ).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[tokens] = gradient @ weight[:rows]
            if grad_weight is not None:
                _add_product(grad_weight[:rows], gradient, hidden[tokens])
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients that the forward pass left."""
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * grad_loss).to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_loss).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _add_product(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """Add ``gradient.T @ hidden`` to ``total`` in its dtype."""
    if total.dtype == hidden.dtype:
        total.addmm_(gradient.T, hidden)
    else:
        total.add_(gradient.T @ hidden)
