"""Which ranks are slow: the time of each rank's own work, side by side."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["OWN_WORK", "StragglerRow", "straggler_sentence", "straggler_table"]

OWN_WORK = ("reading of data", "forward and backward")
"""Parts of a step in which a rank mostly works for itself; in the others it waits for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglerRow:
    """One rank's mean seconds a step."""

    rank: int
    host: str
    seconds: Mapping[str, float]
    ratio: float
    """Its own work over the median rank's."""


def straggler_table(
    seconds: Sequence[Mapping[str, float]], *, hosts: Sequence[str]
) -> list[StragglerRow]:
    """The ranks, slowest first.

    Args:
        seconds: By rank: mean seconds a step of each part.
        hosts: By rank: the machine.
    """
    own = [sum(parts.get(name, 0.0) for name in OWN_WORK) for parts in seconds]
    middle = statistics.median(own)
    rows = [
        StragglerRow(
            rank=rank,
            host=hosts[rank],
            seconds={name: round(value, 6) for name, value in parts.items()},
            ratio=own[rank] / middle if middle > 0 else 1.0,
        )
        for rank, parts in enumerate(seconds)
    ]
    return sorted(rows, key=lambda row: (-row.ratio, row.rank))


def straggler_sentence(rows: Sequence[StragglerRow], *, steps: int) -> str:
    """Say who is slowest."""
    slowest = rows[0]
    parts = ", ".join(f"{name} {slowest.seconds.get(name, 0.0):.3f} s" for name in OWN_WORK)
    return (
        f"Slowest of {len(rows)} ranks over {steps} steps: rank {slowest.rank} ({slowest.host}), "
        f"{slowest.ratio:.2f} times the median ({parts})."
    )
