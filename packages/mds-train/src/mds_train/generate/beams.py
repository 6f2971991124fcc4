"""Beam search: keeps the likeliest beginnings, not only the likeliest next token.

Its rules are those of transformers: which candidates may end, how length counts, when to stop.

Shapes: ``k`` beams, ``v`` vocabulary, ``c`` candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from mds_core.models import GPT
from mds_train.generate.request import check_length
from mds_train.generate.sampling import Sampling, penalized

__all__ = ["Beam", "BeamSearch", "beam_search"]

_IMPOSSIBLE = -1.0e9


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSearch:
    """How to search."""

    beams: int
    """Beginnings that are kept; also the number of answers."""
    length_penalty: float = 1.0
    """A sum of log-probabilities is divided by the length to this power; above 0 favours long."""
    early_stopping: bool = False
    """Stop when there are as many answers as beams, although a better one might come."""
    repetition_penalty: float = 1.0
    """As for `Sampling`."""

    def __post_init__(self) -> None:
        if self.beams < 1:
            raise ValueError(f"beams ({self.beams}) must be 1 or more.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Beam:
    """An answer of the search."""

    tokens: tuple[int, ...]
    """Without the end token."""
    score: float
    """Its log-probability over its length to the power of the penalty."""
    ended: bool
    """Whether an end token ended it, and not the length."""


@torch.inference_mode()
def beam_search(
    model: GPT,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    search: BeamSearch,
    end_tokens: frozenset[int] = frozenset(),
) -> list[Beam]:
    """Return the best answers to a prompt, best first.

    Raises:
        ValueError: If the prompt is empty or the model has not enough positions.
    """
    check_length(model.config, prompt=prompt, max_new_tokens=max_new_tokens)
    if max_new_tokens == 0:
        return [Beam(tokens=(), score=0.0, ended=False)]
    device = next(model.parameters()).device
    cache = model.new_cache(1, max_length=len(prompt) + max_new_tokens)
    logits = cast("Tensor", model(torch.tensor([list(prompt)], device=device), cache=cache))[:, -1]
    cache.reorder(torch.zeros(search.beams, dtype=torch.int64, device=device))
    logits = logits.expand(search.beams, -1)
    state = _State(tuple(prompt), search=search, end_tokens=end_tokens, longest=max_new_tokens)
    while (chosen := state.advance(logits.float().cpu())) is not None:
        sources, tokens = chosen
        cache.reorder(torch.tensor(sources, device=device))
        fresh = torch.tensor(tokens, device=device)[:, None]
        logits = cast("Tensor", model(fresh, cache=cache))[:, -1]
    return state.best()


class _State:
    """The beginnings that are kept and the answers found; no model here."""

    def __init__(
        self,
        prompt: tuple[int, ...],
        *,
        search: BeamSearch,
        end_tokens: frozenset[int],
        longest: int,
    ) -> None:
        self.prompt, self.search, self.end_tokens = prompt, search, end_tokens
        self.longest = longest
        self.running: list[tuple[int, ...]] = [()] * search.beams
        # All beams are equal at the start; only the first counts, or they would stay equal.
        self.scores = torch.tensor([0.0] + [_IMPOSSIBLE] * (search.beams - 1))
        self.found: list[Beam] = []

    def advance(self, logits: Tensor) -> tuple[list[int], list[int]] | None:
        """Choose the next tokens.

        Args:
            logits: [k, v].

        Returns:
            Which beam each new beam continues, and with which token; None at the end.
        """
        length = len(self.running[0]) + 1
        candidates = self._candidates(logits)
        for score, source, token in candidates[: self.search.beams]:
            if self._ends(token, length):
                self._add(self.running[source], token, score=score, length=length)
        going = [each for each in candidates if not self._ends(each[2], length)]
        going = going[: self.search.beams]
        if not going or self._settled(best=going[0][0], length=length):
            return None
        self.running = [(*self.running[source], token) for _, source, token in going]
        self.scores = torch.tensor([score for score, _, _ in going])
        return [source for _, source, _ in going], [token for _, _, token in going]

    def best(self) -> list[Beam]:
        """The answers, best first."""
        return self.found

    def _candidates(self, logits: Tensor) -> list[tuple[float, int, int]]:
        """Score, beam and token of the likeliest continuations, likeliest first."""
        logarithms = logits.log_softmax(dim=-1)
        if self.search.repetition_penalty != 1:
            sampling = Sampling(repetition_penalty=self.search.repetition_penalty)
            rows = zip(logarithms, self.running, strict=True)
            logarithms = torch.stack(
                [penalized(r, sampling=sampling, prompt=self.prompt, answer=t) for r, t in rows]
            )
        total = (logarithms + self.scores[:, None]).flatten()
        # So many that, whichever of them end, as many as there are beams go on.
        count = max(2, 1 + len(self.end_tokens)) * self.search.beams
        top = total.topk(min(count, len(total)))
        size = logits.size(-1)
        pairs = zip(top.values.tolist(), top.indices.tolist(), strict=True)
        return [(score, index // size, index % size) for score, index in pairs]

    def _ends(self, token: int, length: int) -> bool:
        return token in self.end_tokens or length == self.longest

    def _add(self, before: tuple[int, ...], token: int, *, score: float, length: int) -> None:
        ended = token in self.end_tokens
        tokens = before if ended else (*before, token)
        share = score / length**self.search.length_penalty
        self.found.append(Beam(tokens=tokens, score=share, ended=ended))
        self.found.sort(key=lambda beam: -beam.score)
        del self.found[self.search.beams :]

    def _settled(self, *, best: float, length: int) -> bool:
        """Whether no beginning can become better than the answers that are there."""
        if len(self.found) < self.search.beams:
            return False
        hoped = best / length**self.search.length_penalty
        return self.search.early_stopping or hoped <= self.found[-1].score
