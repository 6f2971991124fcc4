"""Chooses the next token from logits: greedy, temperature, top-k, top-p.

Shapes: ``b`` sequences, ``v`` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Sampling", "filtered_probabilities", "next_tokens"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token always (greedy)."""

    top_k: int = 0
    """Only this many most likely tokens; 0 for all."""

    top_p: float = 1.0
    """Only the most likely tokens that together have this probability; 1 for all."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature ({self.temperature}) must not be negative.")
        if self.top_k < 0:
            raise ValueError(f"top_k ({self.top_k}) must not be negative; 0 keeps all tokens.")
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p ({self.top_p}) must be above 0 and at most 1; 1 keeps all tokens."
            )

    @property
    def greedy(self) -> bool:
        """Whether nothing is left to chance."""
        return self.temperature == 0 or self.top_k == 1


def next_tokens(logits: Tensor, *, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Choose a token for every sequence.

    Args:
        logits: [b, v] of the last position.
        sampling: how to choose.
        generator: CPU generator; the draw takes place there, so a seed means the same on any
            device.

    Returns:
        [b] int64 on the device of ``logits``.
    """
    if sampling.greedy:
        return logits.argmax(dim=-1)
    probabilities = filtered_probabilities(logits.float().cpu(), sampling=sampling)
    drawn = torch.multinomial(probabilities, num_samples=1, generator=generator)
    return drawn.squeeze(-1).to(logits.device)


def filtered_probabilities(logits: Tensor, *, sampling: Sampling) -> Tensor:
    """Return the probabilities [b, v] from which the token is drawn."""
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if sampling.top_p < 1:
        logits = logits.masked_fill(_outside_nucleus(logits, sampling.top_p), float("-inf"))
    return logits.softmax(dim=-1)


def _outside_nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Mark the tokens after those whose probabilities first add up to ``top_p``."""
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities  # of the tokens more likely than this
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= top_p)
