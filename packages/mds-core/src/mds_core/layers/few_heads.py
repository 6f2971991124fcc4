"""Key/value heads that are fewer than the tensor-parallel ranks, as in multi-query attention.

Ranks whose query heads look at the same key/value head share out its channels: each projects a part
of the key and of the value, and all get the whole before they attend. So every row of the weight is
held, updated and saved by one rank, and no gradient has to be kept equal between copies.

Shapes: ``b`` micro batch, ``s`` sequence, ``t`` tensor-parallel size, ``g`` key/value heads of the
model, ``r`` ranks that share one, ``d`` head dim.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from mds_core.collectives import gather_partial
from mds_core.config import GPTConfig
from mds_core.groups import group_rank, group_size

__all__ = ["key_value_rows", "query_key_value_rows", "sharers", "whole_heads"]

Rows = tuple[tuple[int, int], ...]


def sharers(config: GPTConfig, tp: ProcessGroup | None) -> int:
    """How many ranks need the same key/value head; 1 where each has heads of its own."""
    return max(group_size(tp) // config.kv_heads, 1)


def query_key_value_rows(config: GPTConfig, tp: ProcessGroup | None) -> Rows:
    """This rank's rows of a projection grouped by head: queries, then parts of key and value."""
    ranks = sharers(config, tp)
    group, place = divmod(group_rank(tp), ranks)
    per_group = config.num_attention_heads // config.kv_heads
    start, queries = group * (per_group + 2) * config.channels, per_group // ranks * config.channels
    own = (start + place * queries, start + (place + 1) * queries)
    return (own, *_parts(start + per_group * config.channels, config, place=place, ranks=ranks))


def key_value_rows(config: GPTConfig, tp: ProcessGroup | None) -> Rows:
    """This rank's rows of a projection to keys and values only, grouped by head."""
    ranks = sharers(config, tp)
    group, place = divmod(group_rank(tp), ranks)
    return _parts(group * 2 * config.channels, config, place=place, ranks=ranks)


def _parts(key: int, config: GPTConfig, *, place: int, ranks: int) -> Rows:
    """Parts of a key that begins at this row, and of the value behind it."""
    part = config.channels // ranks
    starts = (key + place * part, key + config.channels + place * part)
    return tuple((start, start + part) for start in starts)


def whole_heads(parts: Tensor, *, tp: ProcessGroup, ranks: int) -> Tensor:
    """Join the ranks' parts of the head that this rank looks at.

    Args:
        parts: [b, s, 2 d / r], this rank's part of the key, then of the value.
        tp: All tensor-parallel ranks.
        ranks: How many of them share a head, r.

    Returns:
        [b, s, 2 d], the key, then the value.
    """
    # Each rank's gradient of a head is only that of its own queries.
    every = gather_partial(parts, group=tp, dim=-1)
    b, s, width = every.shape
    heads = every.view(b, s, tp.size() // ranks, ranks, 2, -1)
    own = heads[:, :, tp.rank() // ranks].transpose(2, 3)  # [b, s, 2, r, d / r]
    return own.reshape(b, s, width * ranks // tp.size())
