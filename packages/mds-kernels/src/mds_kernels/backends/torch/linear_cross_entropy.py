"""Output projection and cross-entropy in one: the logits exist a chunk of tokens at a time.

By default the forward pass computes the gradients while a chunk's logits are at hand, and the
backward pass only scales them. With ``recompute`` it keeps two numbers a token instead and the
backward pass makes each chunk's logits again.

Letters: n tokens, c tokens of a chunk, h hidden, v vocabulary, t tensor-parallel size,
r true vocabulary rows of this rank.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from mds_kernels.backends.torch.graph_op import graph_op, pack, unpack
from mds_kernels.backends.torch.vocabulary_softmax import (
    accumulation_dtype,
    check_labels,
    default_chunk,
    power_of_two_below,
    token_weights,
)
from mds_kernels.backends.torch.wgrad import add_product, blocks, buffers
from mds_kernels.objective import Objective


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_weights: Tensor | None,
    *,
    objective: Objective,
    recompute: bool,
    arithmetic: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the losses, and [n] the losses, detached."""
    training = torch.is_grad_enabled()
    wanted = (training and hidden.requires_grad, training and weight.requires_grad)
    packed = *pack(objective), arithmetic
    function = _Recomputing if recompute and any(wanted) else _GradientsInForward
    loss_sum, losses = function.apply(hidden, weight, labels, loss_weights, packed, wanted)  # type: ignore[no-untyped-call]
    return loss_sum, losses


def _arithmetic(name: str) -> Any:
    """Return the module that works a chunk of logits in a backend."""
    return import_module(f"mds_kernels.backends.{name}.vocabulary_softmax")


_NEITHER = (False, False)


class _GradientsInForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        loss_weights: Tensor | None,
        packed: tuple[Any, ...],
        wanted: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor]:
        loss_sum, losses, _, grad_hidden, grad_weight = _forward(
            hidden, weight, labels, loss_weights, *wanted, *packed
        )
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.wanted, ctx.weight_dtype = wanted, weight.dtype
        ctx.mark_non_differentiable(losses)
        return loss_sum, losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # Not in place: a second backward pass over a retained graph finds the saved ones untouched.
        grad_hidden, grad_weight = ctx.saved_tensors
        want_hidden, want_weight = ctx.wanted
        return (
            _scaled(grad_hidden, grad_loss, grad_hidden.dtype) if want_hidden else None,
            _scaled(grad_weight, grad_loss, ctx.weight_dtype) if want_weight else None,
            *(None,) * 4,
        )


class _Recomputing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        loss_weights: Tensor | None,
        packed: tuple[Any, ...],
        wanted: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor]:
        loss_sum, losses, statistics, _, _ = _forward(
            hidden, weight, labels, loss_weights, *_NEITHER, *packed
        )
        ctx.save_for_backward(hidden, weight, labels, loss_weights, statistics)
        ctx.wanted, ctx.packed = wanted, packed
        ctx.mark_non_differentiable(losses)
        return loss_sum, losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        want_hidden, want_weight = ctx.wanted
        grad_hidden, grad_weight = _backward(
            grad_loss, *ctx.saved_tensors, want_hidden, want_weight, *ctx.packed
        )
        return (
            grad_hidden if want_hidden else None,
            grad_weight.to(ctx.saved_tensors[1].dtype) if want_weight else None,
            *(None,) * 4,
        )


class _Logits:
    """The logits of one chunk after the other, in the same memory.

    A CPU gives large tensors back to the system, and filling fresh pages takes longer than the
    product that fills them. Its many passes over the logits go block by block, in its cache.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, *, chunk: int, block: int | None, dtype: torch.dtype
    ) -> None:
        self._inputs = hidden, weight
        tokens = min(chunk, hidden.shape[0])
        self._block = min(block or tokens, tokens)
        self._product = hidden.new_empty(tokens, weight.shape[0])
        self._wide = None
        if dtype != hidden.dtype:
            self._wide = hidden.new_empty(self._block, weight.shape[0], dtype=dtype)

    def worked(self, tokens: slice, work: Callable[[Tensor, slice], Tensor | None]) -> Tensor:
        """Return the logits [c, r] of a chunk after ``work``, in the dtype of the inputs.

        Args:
            tokens: The chunk.
            work: Takes the logits of a block of tokens, to be overwritten, and which tokens these
                are; what it returns takes their place.
        """
        hidden, weight = self._inputs[0][tokens], self._inputs[1]
        product = torch.mm(hidden, weight.T, out=self._product[: len(hidden)])
        for start in range(0, len(hidden), self._block):
            part = product[start : start + self._block]
            logits = part if self._wide is None else self._wide[: len(part)].copy_(part)
            first = tokens.start + start
            result = work(logits, slice(first, first + len(part)))
            if result is not None and result is not part:
                part.copy_(result)
        return product


class _Gradients:
    """Sums the gradients of hidden and weight over the chunks; an empty tensor where not wanted."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, *, rows: int, wanted: tuple[bool, bool]
    ) -> None:
        self.wanted = wanted
        self.hidden, self.weight = _empty_gradients(hidden, weight, wanted)
        self.weight.zero_()
        self._inputs = hidden, weight[:rows]

    def add(self, tokens: slice, gradient: Tensor) -> None:
        """Add the part of a chunk, given the gradient of its logits [c, r]."""
        hidden, weight = self._inputs
        if self.wanted[0]:
            torch.mm(gradient, weight, out=self.hidden[tokens])
        if self.wanted[1]:
            add_product(self.weight[: weight.shape[0]], gradient, hidden[tokens])


def _empty_gradients(
    hidden: Tensor, weight: Tensor, wanted: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    # The weight's gradient sums over chunks, so it must not be rounded to bf16 after each.
    dtype = accumulation_dtype(weight.dtype)
    return (
        hidden.new_empty(hidden.shape if wanted[0] else 0),
        weight.new_empty(weight.shape if wanted[1] else 0, dtype=dtype),
    )


def _scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``gradient * scale`` in ``dtype`` without a whole fp32 copy on the way."""
    if gradient.dtype == dtype:
        return gradient * scale
    result = torch.empty_like(gradient, dtype=dtype)
    (wide,) = buffers(gradient, dtypes=(gradient.dtype,))
    for rows in blocks(gradient):
        part = gradient[rows]
        result[rows] = torch.mul(part, scale, out=wide[: len(part)])
    return result


def _chunk(hidden: Tensor, rows: int, *, copied: bool) -> int:
    """Return how many tokens at a time: their logits are no more than a wide weight's gradient.

    Below 512 the products of a CPU are slower, and the logits of a narrow model small.

    Args:
        hidden: [n, h].
        rows: True vocabulary rows of this rank.
        copied: Whether the logits of a chunk are there in fp32, too.
    """
    wide = power_of_two_below(max(512, hidden.shape[1]))
    chunk = min(wide, default_chunk(rows, hidden.device))
    return chunk if copied or hidden.element_size() > 2 else 2 * chunk


def _over_chunks(
    hidden: Tensor,
    weight: Tensor,
    objective: Objective,
    work: Callable[[Tensor, slice], Tensor | None],
    gradients: _Gradients,
    *,
    arithmetic: Any,
) -> None:
    """Make the logits of every chunk, work them and add what they give to the gradients."""
    dtype = arithmetic.working_dtype(hidden.dtype, accumulation_dtype(hidden.dtype))
    rows = weight.shape[0]
    block = arithmetic.working_block(rows, objective, device=hidden.device, dtype=dtype)
    copied = block is None and dtype != hidden.dtype
    size = objective.chunk_size or _chunk(hidden, rows, copied=copied)
    logits = _Logits(hidden, weight, chunk=size, block=block, dtype=dtype)
    for tokens in objective.chunks(hidden.shape[0], default_size=size):
        gradient = logits.worked(tokens, work)
        if any(gradients.wanted):
            gradients.add(tokens, gradient)


def _fake_forward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_weights: Tensor | None,
    want_hidden: bool,  # noqa: FBT001
    want_weight: bool,  # noqa: FBT001
    *packed: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    losses = hidden.new_empty(hidden.shape[0], dtype=accumulation_dtype(hidden.dtype))
    gradients = _empty_gradients(hidden, weight, (want_hidden, want_weight))
    return losses.new_empty(()), losses, losses.new_empty(2, hidden.shape[0]), *gradients


@graph_op("linear_cross_entropy_forward", fake=_fake_forward)
def _forward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_weights: Tensor | None,
    want_hidden: bool,  # noqa: FBT001 - a graph op's arguments are positional
    want_weight: bool,  # noqa: FBT001
    whole: Sequence[int],
    real: Sequence[float],
    group_name: str,
    arithmetic: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    objective, softmax = unpack(whole, real, group_name), _arithmetic(arithmetic)
    check_labels(labels, objective)
    rows = objective.true_rows(weight.shape[0])
    losses = hidden.new_empty(hidden.shape[0], dtype=accumulation_dtype(hidden.dtype))
    statistics = losses.new_empty(2, hidden.shape[0])
    weights = token_weights(labels, loss_weights, objective, like=losses)
    gradients = _Gradients(hidden, weight, rows=rows, wanted=(want_hidden, want_weight))

    def work(logits: Tensor, tokens: slice) -> Tensor | None:
        normalised = softmax.normalise(logits, labels[tokens], objective)
        losses[tokens] = normalised.losses
        statistics[:, tokens] = normalised.statistics
        if not any(gradients.wanted):
            return None
        gradient: Tensor = softmax.gradient_of_logits(
            normalised.exponentials,
            labels[tokens],
            objective,
            statistics=normalised.statistics,
            weights=weights[tokens],
        )
        return gradient

    _over_chunks(hidden, weight[:rows], objective, work, gradients, arithmetic=softmax)
    return (losses * weights).sum(), losses, statistics, gradients.hidden, gradients.weight


def _fake_backward(
    grad_loss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_weights: Tensor | None,
    statistics: Tensor,
    want_hidden: bool,  # noqa: FBT001
    want_weight: bool,  # noqa: FBT001
    *packed: object,
) -> tuple[Tensor, Tensor]:
    return _empty_gradients(hidden, weight, (want_hidden, want_weight))


@graph_op("linear_cross_entropy_backward", fake=_fake_backward)
def _backward(
    grad_loss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_weights: Tensor | None,
    statistics: Tensor,
    want_hidden: bool,  # noqa: FBT001
    want_weight: bool,  # noqa: FBT001
    whole: Sequence[int],
    real: Sequence[float],
    group_name: str,
    arithmetic: str,
) -> tuple[Tensor, Tensor]:
    objective, softmax = unpack(whole, real, group_name), _arithmetic(arithmetic)
    rows = objective.true_rows(weight.shape[0])
    # The incoming gradient carries the loss scale of fp16, so it comes in before any rounding.
    weights = token_weights(labels, loss_weights, objective, like=statistics) * grad_loss
    gradients = _Gradients(hidden, weight, rows=rows, wanted=(want_hidden, want_weight))

    def work(logits: Tensor, tokens: slice) -> Tensor:
        gradient: Tensor = softmax.gradient_of_logits(
            softmax.exponentials(logits, statistics[:, tokens]),
            labels[tokens],
            objective,
            statistics=statistics[:, tokens],
            weights=weights[tokens],
        )
        return gradient

    _over_chunks(hidden, weight[:rows], objective, work, gradients, arithmetic=softmax)
    return gradients.hidden, gradients.weight
