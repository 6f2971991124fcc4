"""The loss on held-out samples: the same samples every time, the exact mean over their tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mds_core.groups import ProcessGroups
from mds_train.batches import Collate, Samples, collate
from mds_train.engines.interface import Engine
from mds_train.exchange import sum_over

__all__ = ["Evaluation", "evaluate", "shares"]

_AT_ONCE = 16  # micro batches that are read together, so that pipeline stages work side by side


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """A mean loss and how many tokens it is over."""

    loss: float
    """The sum of the terms."""

    tokens: int
    terms: dict[str, float]
    """By name; none where there is but one."""


def shares(
    num_samples: int, *, micro_batch_size: int, rank: int, size: int
) -> list[tuple[list[int], int]]:
    """What one data-parallel rank reads: sample numbers of each micro batch, and how many count.

    Every rank gets equally many micro batches of equal size, since a forward pass may need all
    ranks; missing samples are filled up with sample 0, which then does not count.
    """
    at_once = micro_batch_size * size
    parts = []
    for start in range(rank * micro_batch_size, -(-num_samples // at_once) * at_once, at_once):
        own = list(range(start, min(start + micro_batch_size, num_samples)))
        parts.append((own + [0] * (micro_batch_size - len(own)), len(own)))
    return parts


def evaluate(
    engine: Engine,
    dataset: Samples,
    *,
    num_samples: int,
    micro_batch_size: int,
    groups: ProcessGroups,
    device: torch.device,
    collate: Collate = collate,
) -> Evaluation:
    """Mean loss over the first ``num_samples`` samples, or all where there are fewer."""
    available = min(num_samples, len(dataset))
    sums = counts = torch.zeros((), dtype=torch.float64, device=device)
    parts = shares(
        available, micro_batch_size=micro_batch_size, rank=groups.dp_rank, size=groups.dp_size
    )
    with engine.evaluating():
        for first in range(0, len(parts), _AT_ONCE):
            batch = [
                collate(dataset, numbers).counting(counted).to(device)
                for numbers, counted in parts[first : first + _AT_ONCE]
            ]
            sums = sums + engine.losses(batch)
            counts = counts + torch.stack([micro.counts() for micro in batch]).sum(0)
    sums, counts = sum_over(sums, group=groups.dp), sum_over(counts, group=groups.dp)
    terms = sums / counts.clamp(min=1.0)
    return Evaluation(
        loss=terms.sum().item(), tokens=round(counts[0].item()), terms=batch[0].named(terms)
    )
