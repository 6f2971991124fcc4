"""How a rank's heads are shared out among the ranks of a sequence (DeepSpeed-Ulysses).

Inside attention each of them has all positions of its heads. Where the key/value heads do not
divide, or are fewer than the ranks, the query heads of each are dealt to several copies of it;
where not even the query heads divide, empty heads fill up the last shares, which costs no time,
since the fullest share is what all wait for.

Shapes: ``b`` micro batch, ``s`` sequence, ``g`` key/value heads of a tensor-parallel rank, ``p``
query heads of each, ``c`` copies of each, ``u`` ulysses size, ``d`` head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from mds_core.config import GPTConfig

__all__ = ["HeadShares"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShares:
    """Equal shares of the heads of one tensor-parallel rank."""

    groups: int
    """Key/value heads before they are shared out, g."""
    per_group: int
    """Query heads of each, p."""
    copies: int
    """Copies of each, c."""
    ranks: int
    """Ranks that take a share, u."""
    channels: int
    """Of a head, d."""

    @classmethod
    def of(cls, config: GPTConfig, *, tp_size: int, ulysses_size: int) -> Self:
        """The shares in which the fullest has the fewest query heads, with few copies."""
        groups = max(config.kv_heads // tp_size, 1)
        per_group = config.num_attention_heads // tp_size // groups
        return min(
            (
                cls(
                    groups=groups,
                    per_group=per_group,
                    copies=copies,
                    ranks=ulysses_size,
                    channels=config.channels,
                )
                for copies in range(1, per_group + 1)
                if per_group % copies == 0
            ),
            key=lambda shares: (shares.heads, shares.copies),
        )

    @property
    def kv_heads(self) -> int:
        """Key/value heads of a share, copies and empty ones included."""
        return -(-self.groups * self.copies // self.ranks)

    @property
    def queries_per_group(self) -> int:
        """Query heads that look at each of them."""
        return self.per_group // self.copies

    @property
    def heads(self) -> int:
        """Query heads of a share, empty ones included."""
        return self.kv_heads * self.queries_per_group

    def dealt(self, qkv: Tensor) -> Tensor:
        """Order a projection so that it divides into the shares.

        Args:
            qkv: [b, s, g (p + 2) d], of each key/value head the queries, key and value.

        Returns:
            [b, s, u k (p / c + 2) d] with k key/value heads in a share.
        """
        missing = self.kv_heads * self.ranks - self.groups * self.copies
        if self.copies > 1:
            places = (*qkv.shape[:2], self.groups)
            grouped = qkv.view(*places, self.per_group + 2, self.channels)
            queries, pair = torch.split(grouped, [self.per_group, 2], dim=3)
            queries = queries.reshape(*places, self.copies, self.queries_per_group, self.channels)
            # The copies' gradients are summed here, after they have come back from the ranks.
            pairs = pair.unsqueeze(3).expand(-1, -1, -1, self.copies, -1, -1)
            qkv = torch.cat([queries, pairs], dim=4).flatten(2)
        if missing:
            qkv = F.pad(qkv, (0, missing * (self.queries_per_group + 2) * self.channels))
        return qkv

    def kept(self, joined: Tensor) -> Tensor:
        """Leave out the empty heads of [b, s, u n d], where n is `heads`: [b, s, g p d]."""
        return joined[..., : self.groups * self.per_group * self.channels]
