"""What is asked of a model, and what it has answered so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from mds_core import GPTConfig
from mds_train.generate.sampling import Sampling

__all__ = ["FinishReason", "Request", "Running", "Token", "check_length", "likelihoods"]

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A token, and how likely the model found it before any penalty or temperature."""

    id: int
    logprob: float | None = None
    """Natural logarithm of its probability; None where nobody asked, and for a first token."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens there with their logarithms, likeliest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One sequence to continue."""

    prompt: tuple[int, ...]
    """At least one token."""
    max_new_tokens: int
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))
    seed: int = 1234
    """What is drawn depends on it alone, not on what else is generated meanwhile."""
    end_tokens: frozenset[int] = frozenset()
    """The sequence ends when one of them is chosen; it is not part of the answer."""
    logprobs: int | None = None
    """How many likeliest tokens to tell with each; None tells no likelihoods at all."""
    prompt_logprobs: bool = False
    """Also tell those of the prompt's tokens."""


class Running:
    """A request on its way.

    Args:
        request: What was asked.

    Attributes:
        tokens: The answer so far.
        prompt_tokens: The prompt with its likelihoods, if they were asked for.
        finish_reason: Why the answer ended: an end token, stop string, the length, or the asker.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[Token] = []
        self.prompt_tokens: list[Token] = []
        self.finish_reason: FinishReason | None = None
        self.generator = torch.Generator().manual_seed(request.seed)

    @property
    def answer(self) -> list[int]:
        """The ids of the answer so far."""
        return [token.id for token in self.tokens]


def check_length(
    config: GPTConfig, *, prompt: Sequence[int], max_new_tokens: int, longest: int | None = None
) -> None:
    """Refuse what the model cannot do.

    Args:
        config: of the model.
        prompt: the tokens given.
        max_new_tokens: the most tokens to come.
        longest: tokens that the cache can hold; as many as wanted when left out.

    Raises:
        ValueError: If the prompt is empty or names unknown tokens, or there are not enough
            positions.
    """
    if not prompt:
        raise ValueError("A prompt has no token; give each prompt at least one.")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens ({max_new_tokens}) must not be negative.")
    worst = max(prompt) if min(prompt) >= 0 else min(prompt)
    if not 0 <= worst < config.vocab_size:
        raise ValueError(
            f"The prompt has the token {worst}, but the model's vocabulary has "
            f"{config.vocab_size} tokens; take the tokenizer that belongs to the model."
        )
    limit = longest
    if config.position_embedding == "learned":
        limit = min(longest or config.max_position_embeddings, config.max_position_embeddings)
    needed = len(prompt) + max_new_tokens
    if limit is not None and needed > limit:
        raise ValueError(
            f"The prompt of {len(prompt)} tokens and {max_new_tokens} new ones need {needed} "
            f"positions, but the model has {limit}; shorten the prompt or ask for fewer tokens."
        )


def likelihoods(logits: Tensor, tokens: Sequence[int], *, top: int) -> list[Token]:
    """Say how likely tokens were.

    Args:
        logits: [n, v], each row what the model said before the token.
        tokens: n ids.
        top: how many likeliest tokens to tell with each.
    """
    logarithms = logits.float().log_softmax(dim=-1)
    best = logarithms.topk(min(top, logits.size(-1)), dim=-1)
    rows = zip(tokens, best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        Token(
            id=token,
            logprob=logarithms[row, token].item(),
            top=tuple(zip(likeliest, values, strict=True)),
        )
        for row, (token, likeliest, values) in enumerate(rows)
    ]
