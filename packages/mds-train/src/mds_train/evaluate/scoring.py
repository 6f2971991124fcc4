"""How likely a model finds given tokens after others.

Shapes: ``b`` sequences, ``s`` tokens, ``h`` hidden, ``n`` scored tokens, ``v`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from mds_core.models import GPT

__all__ = ["Passage", "Score", "score"]

_LOGITS_AT_A_TIME = 512
_SORTED_BATCHES = 32


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens of which the last ones are scored."""

    tokens: Sequence[int]
    start: int
    """The first that is scored, given all before it; at least 1."""


@dataclass(frozen=True, slots=True)
class Score:
    """What the model thinks of a passage."""

    logprob: float
    """Natural logarithm of the probability of the scored tokens together."""
    is_greedy: bool
    """Whether each of them is the likeliest in its place."""
    count: int
    """Tokens scored."""


@torch.inference_mode()
def score(model: GPT, passages: Iterable[Passage], *, batch_size: int = 8) -> Iterator[Score]:
    """Score passages in their order, some at a time.

    Args:
        model: in evaluation mode.
        passages: none longer than the model's positions.
        batch_size: passages that are computed together; those of like length are, so that little
            of a batch is filling.
    """
    waiting = iter(passages)
    while many := list(islice(waiting, batch_size * _SORTED_BATCHES)):
        order = sorted(range(len(many)), key=lambda place: -len(many[place].tokens))
        scores: dict[int, Score] = {}
        for first in range(0, len(order), batch_size):
            places = order[first : first + batch_size]
            found = _score_batch(model, [many[place] for place in places])
            scores |= dict(zip(places, found, strict=True))
        yield from (scores[place] for place in range(len(many)))


def _score_batch(model: GPT, passages: Sequence[Passage]) -> list[Score]:
    device = next(model.parameters()).device
    longest = max(len(passage.tokens) for passage in passages) - 1
    rows = [[*passage.tokens[:-1]] for passage in passages]
    # What fills a row stands behind its tokens, where no token sees it.
    filled = [row + [0] * (longest - len(row)) for row in rows]
    hidden = model.forward_stage(
        torch.tensor(filled, device=device), position_ids=torch.arange(longest, device=device)[None]
    )
    wanted = torch.cat(
        [row[p.start - 1 : len(p.tokens) - 1] for row, p in zip(hidden, passages, strict=True)]
    )
    targets = [token for passage in passages for token in passage.tokens[passage.start :]]
    logprobs, likeliest = _of_targets(model, wanted, torch.tensor(targets, device=device))
    counts = [len(passage.tokens) - passage.start for passage in passages]
    parts = zip(torch.split(logprobs, counts), torch.split(likeliest, counts), counts, strict=True)
    return [Score(part.double().sum().item(), bool(hit.all()), n) for part, hit, n in parts]


def _of_targets(model: GPT, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability [n] of each target after hidden states [n, h], and if it is likeliest."""
    logprobs, likeliest = [], []
    pieces = (torch.split(each, _LOGITS_AT_A_TIME) for each in (hidden, targets))
    for states, wanted in zip(*pieces, strict=True):
        logits = model.logits(states[None])[0]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logprobs.append(logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0])
        likeliest.append(logits.argmax(-1) == wanted)
    return torch.cat(logprobs), torch.cat(likeliest)
