"""Which positions of a sequence a rank holds, and the way there and back.

Shapes: ``b`` micro batch, ``s`` sequence, ``u`` ulysses size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mds_core.collectives import gather
from mds_core.groups import ProcessGroups
from mds_core.layers.ring import zigzag

__all__ = ["SequenceShare"]


class SequenceShare(NamedTuple):
    """How ranks share the positions of each sequence."""

    groups: ProcessGroups
    ring: bool
    """Ranks along ulysses hold an early and a late stretch each; else one stretch."""
    sequence_parallel: bool
    """Tensor-parallel ranks share what an ulysses place holds, between the split layers."""

    @property
    def shares(self) -> int:
        """Ranks over which the positions of the residual stream are split."""
        return self.groups.ulysses_size * (self.groups.tp_size if self.sequence_parallel else 1)

    def places(self, length: int) -> tuple[tuple[range, ...], ...]:
        """Stretches of the sequence that each ulysses place holds."""
        ranks = self.groups.ulysses_size
        if self.ring and ranks > 1:
            return zigzag(length, ranks=ranks)
        share = length // ranks
        return tuple((range(place * share, (place + 1) * share),) for place in range(ranks))

    def between(self, length: int) -> tuple[range, ...]:
        """Stretches that this rank's ulysses place holds."""
        return self.places(length)[self.groups.ulysses_rank]

    def rows(self, length: int) -> tuple[range, ...]:
        """Stretches of the sequence that this rank's residual stream holds."""
        shares, groups = self.shares, self.groups
        if length % shares:
            raise ValueError(
                f"the sequence length ({length}) is not a multiple of {shares}, the ranks that "
                f"share a sequence (ulysses_size {groups.ulysses_size}, times tp_size "
                f"{groups.tp_size} with sequence_parallel). Pad the sequence or change the layout."
            )
        own = self.between(length)
        if not self.sequence_parallel:
            return own
        share = length // shares
        return _cut(own, groups.tp_rank * share, (groups.tp_rank + 1) * share)

    def own(self, x: Tensor) -> Tensor:
        """The positions of [b, s] that this rank's ulysses place holds, [b, s / u]."""
        own = self.between(x.size(1))
        return torch.cat([x[:, rows.start : rows.stop] for rows in own], dim=1)

    def joined(self, x: Tensor) -> Tensor:
        """All positions [b, s, ...] of the ulysses ranks' [b, s / u, ...], in their order."""
        x = gather(x, group=self.groups.ulysses, dim=1)
        if self.groups.ulysses is None or not self.ring:
            return x
        held = [rows for place in self.places(x.size(1)) for rows in place]
        parts = x.split([len(rows) for rows in held], dim=1)  # type: ignore[no-untyped-call]
        ordered = sorted(zip(held, parts, strict=True), key=lambda pair: pair[0].start)
        return torch.cat([part for _, part in ordered], dim=1)


def _cut(stretches: tuple[range, ...], start: int, stop: int) -> tuple[range, ...]:
    """The positions from ``start`` to ``stop`` of the stretches laid end to end."""
    cut, begin = [], 0
    for rows in stretches:
        part = rows[max(start - begin, 0) : max(stop - begin, 0)]
        cut += [part] if part else []
        begin += len(rows)
    return tuple(cut)
