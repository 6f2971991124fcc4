"""Chooses the next token from logits: penalties, then greedy or drawn among the likely ones.

The steps and their order are those of transformers, so a seed draws the same tokens there.

Shapes: ``b`` sequences, ``v`` vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Sampling", "filtered_probabilities", "next_token", "penalized"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token always (greedy)."""

    top_k: int = 0
    """Only this many most likely tokens; 0 for all."""

    top_p: float = 1.0
    """Only the most likely tokens that together have this probability; 1 for all."""

    min_p: float = 0.0
    """Only tokens at least this share as likely as the likeliest; 0 for all."""

    top_p_decay: float = 1.0
    """``top_p`` is multiplied by it after each token."""

    top_p_bound: float = 0.0
    """A decaying ``top_p`` does not fall below it."""

    repetition_penalty: float = 1.0
    """Above 1, tokens of the prompt and the answer so far become less likely (CTRL's penalty)."""

    presence_penalty: float = 0.0
    """Taken from the logits of tokens that the answer already has."""

    frequency_penalty: float = 0.0
    """Taken from the logits of the answer's tokens, once for each time."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens and what is added to their logits."""

    never_after: tuple[tuple[int, int], ...] = ()
    """Pairs of a token and one that must not follow it."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p_decay", "top_p_bound"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} ({getattr(self, name)}) must not be negative.")
        if self.top_k < 0:
            raise ValueError(f"top_k ({self.top_k}) must not be negative; 0 keeps all tokens.")
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p ({self.top_p}) must be above 0 and at most 1; 1 keeps all tokens."
            )
        if not 0 <= self.min_p <= 1:
            raise ValueError(
                f"min_p ({self.min_p}) must lie between 0 and 1; 0 keeps all tokens, and no token "
                "is more likely than the likeliest."
            )
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(
                f"repetition_penalty ({self.repetition_penalty}) must be above 0; 1 changes "
                "nothing."
            )

    @property
    def greedy(self) -> bool:
        """Whether nothing is left to chance."""
        return self.temperature == 0 or self.top_k == 1

    def nucleus(self, count: int) -> float:
        """The ``top_p`` that holds for the token after ``count`` new ones."""
        return max(self.top_p * self.top_p_decay**count, self.top_p_bound)


def next_token(
    logits: Tensor,
    *,
    sampling: Sampling,
    generator: torch.Generator,
    prompt: Sequence[int] = (),
    answer: Sequence[int] = (),
) -> int:
    """Choose the token that comes next in a sequence.

    Args:
        logits: [v] of the last position.
        sampling: how to choose.
        generator: CPU generator; the draw takes place there, so a seed means the same on any
            device.
        prompt: the tokens that were given.
        answer: the tokens chosen so far.
    """
    logits = penalized(logits.float().cpu(), sampling=sampling, prompt=prompt, answer=answer)
    if sampling.greedy:
        return int(logits.argmax())
    probabilities = filtered_probabilities(logits[None], sampling=sampling, count=len(answer))
    return int(torch.multinomial(probabilities, num_samples=1, generator=generator))


def penalized(
    logits: Tensor, *, sampling: Sampling, prompt: Sequence[int] = (), answer: Sequence[int] = ()
) -> Tensor:
    """Return the logits [v] with penalties for what was said, and with biases."""
    if sampling.repetition_penalty != 1:
        known = torch.tensor(sorted({*prompt, *answer}))
        scores, penalty = logits[known], sampling.repetition_penalty
        logits = logits.scatter(
            0, known, torch.where(scores < 0, scores * penalty, scores / penalty)
        )
    if answer and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(answer)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype)
        taken = sampling.presence_penalty + sampling.frequency_penalty * times
        logits = logits.index_add(0, torch.tensor(list(counts)), -taken)
    if sampling.logit_bias:
        tokens, added = zip(*sampling.logit_bias, strict=True)
        logits = logits.index_add(0, torch.tensor(tokens), torch.tensor(added, dtype=logits.dtype))
    last = answer[-1:] or prompt[-1:]
    forbidden = [token for before, token in sampling.never_after if [before] == list(last)]
    if forbidden:
        logits = logits.index_fill(0, torch.tensor(forbidden), float("-inf"))
    return logits


def filtered_probabilities(logits: Tensor, *, sampling: Sampling, count: int = 0) -> Tensor:
    """Return the probabilities [b, v] from which the token after ``count`` new ones is drawn."""
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    top_p = sampling.nucleus(count)
    if top_p < 1:
        logits = logits.masked_fill(_outside_nucleus(logits, top_p), float("-inf"))
    if sampling.min_p > 0:
        probabilities = logits.softmax(dim=-1)
        least = sampling.min_p * probabilities.amax(dim=-1, keepdim=True)
        logits = logits.masked_fill(probabilities < least, float("-inf"))
    return logits.softmax(dim=-1)


def _outside_nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Mark the tokens after those whose probabilities first add up to ``top_p``."""
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities  # of the tokens more likely than this
    outside = before >= top_p
    outside[..., 0] = False  # the likeliest stays, however small the nucleus
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, outside)
