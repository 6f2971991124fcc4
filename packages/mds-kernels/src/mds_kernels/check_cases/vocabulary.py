"""Cases of the losses over a vocabulary."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from mds_kernels.check import Check, Inputs
from mds_kernels.check_cases.inputs import far, fixed, labels, normal, strided
from mds_kernels.ops import cross_entropy, linear_cross_entropy

__all__ = ["CASES"]


def _plain_losses(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    true = logits[:, :vocab_size]
    true = true if true.dtype == torch.float64 else true.float()
    losses = F.cross_entropy(true, labels, reduction="none", label_smoothing=label_smoothing)
    return losses + z_loss * true.logsumexp(dim=1).square() * (labels != -100)


def _plain_linear(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    loss_weights: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    losses = _plain_losses(hidden @ weight.T, labels, **arguments)
    weighted = losses if loss_weights is None else losses * loss_weights
    return weighted.sum(), losses.detach()


def _linear_inputs(
    tokens: int = 37, scale: float = 1.0, *, words: int = 97, weigh: bool = True
) -> Callable[[Generator], Inputs]:
    def make(generator: Generator) -> Inputs:
        return {
            "hidden": normal(generator, tokens, 24, scale=scale),
            "weight": normal(generator, words + 4, 24),
            "labels": labels(generator, tokens, words),
            "loss_weights": fixed(generator, tokens) if weigh else None,
        }

    return make


def _strided_linear(generator: Generator) -> Inputs:
    return {
        "hidden": strided(generator, 37, 24),
        "weight": strided(generator, 101, 24),
        "labels": labels(generator, 74, 97)[::2],
    }


def _all_ignored(generator: Generator) -> Inputs:
    inputs = _linear_inputs()(generator)
    return {**inputs, "labels": torch.full((37,), -100)}


def _linear(
    case: str, inputs: Callable[[Generator], Inputs], *, words: int = 97, **options: Any
) -> Check:
    plain_loss = case.startswith("huge logits")
    return Check(
        op="linear_cross_entropy",
        case=case,
        inputs=inputs,
        run=linear_cross_entropy.linear_cross_entropy,
        reference=linear_cross_entropy.linear_cross_entropy_reference,
        plain=_plain_linear,
        # The squared log-sum-exp of huge logits would drown the loss that the case is about.
        arguments={"vocab_size": words}
        if plain_loss
        else {"vocab_size": words, "label_smoothing": 0.1, "z_loss": 1e-3},
        options={"chunk_size": 10, **options},
    )


def _cross(case: str, inputs: Callable[[Generator], Inputs], **arguments: Any) -> Check:
    return Check(
        op="cross_entropy",
        case=case,
        inputs=inputs,
        run=cross_entropy.cross_entropy,
        reference=cross_entropy.cross_entropy_reference,
        plain=_plain_losses,
        arguments=arguments,
        options={"chunk_size": 10},
    )


CASES: tuple[Check, ...] = (
    _linear("odd sizes, padding", _linear_inputs()),
    _linear("recomputing", _linear_inputs(), recompute=True),
    # So many that a CPU's cache holds fewer tokens' logits than a chunk has.
    _linear("many words", _linear_inputs(19, words=60_000), words=60_000),
    _linear("strided", _strided_linear),
    _linear("no tokens", _linear_inputs(tokens=0)),
    _linear("all ignored", _all_ignored),
    _linear("huge logits", _linear_inputs(scale=1000.0, weigh=False)),
    _linear("huge logits, recomputing", _linear_inputs(scale=1000.0, weigh=False), recompute=True),
    _cross(
        "odd sizes, padding",
        lambda g: {"logits": normal(g, 37, 101), "labels": labels(g, 37, 97)},
        vocab_size=97,
        label_smoothing=0.1,
        z_loss=1e-3,
    ),
    _cross(
        "strided",
        lambda g: {"logits": strided(g, 37, 101), "labels": labels(g, 37, 101)},
    ),
    _cross(
        "no tokens",
        lambda g: {"logits": normal(g, 0, 101), "labels": labels(g, 0, 101)},
    ),
    _cross(
        "huge logits",
        lambda g: {"logits": far(g, 37, 101), "labels": labels(g, 37, 101)},
    ),
)
