"""Every query head of a rank is in one share, beside the key and value that it looks at."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from core_cells import GPT2

from mds_core.layers.head_shares import HeadShares


def shares_of(heads: int, kv_heads: int, ranks: int, *, tp_size: int = 1) -> HeadShares:
    config = replace(
        GPT2, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=2, hidden_size=48
    )
    return HeadShares.of(config, tp_size=tp_size, ulysses_size=ranks)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "copies", "fullest"),
    [
        *((8, 8, 4, 1, 2), (8, 2, 2, 1, 4), (8, 2, 4, 2, 2), (8, 1, 8, 8, 1)),
        *((12, 6, 4, 2, 3), (3, 3, 2, 1, 2), (6, 3, 4, 1, 2), (6, 2, 4, 3, 2)),
    ],
)
def test_heads_are_dealt_out(heads, kv_heads, ranks, copies, fullest) -> None:
    shares = shares_of(heads, kv_heads, ranks)
    names = [
        number
        for group in range(kv_heads)
        for number in (
            *(1 + group * (heads // kv_heads) + query for query in range(heads // kv_heads)),
            *(100 + group, 200 + group),
        )
    ]
    qkv = torch.tensor(names).repeat_interleave(2)[None, None]

    dealt = shares.dealt(qkv)[0, 0, ::2].view(ranks, shares.kv_heads, -1)

    assert (shares.copies, shares.heads) == (copies, fullest)
    queries = dealt[..., :-2]
    assert queries[queries > 0].tolist() == list(range(1, heads + 1))
    for *looking, key, value in dealt.flatten(0, 1).tolist():
        groups = {(query - 1) // (heads // kv_heads) for query in looking if query}
        assert groups <= {key - 100}
        assert (key, value) == (0, 0) or value == key + 100


def test_empty_heads_are_left_out_again() -> None:
    shares = shares_of(3, 3, 2)
    joined = torch.arange(8.0)[None, None]

    assert shares.kept(joined).flatten().tolist() == list(range(6))


def test_only_as_many_query_heads_as_ranks_are_needed() -> None:
    replace(GPT2, num_key_value_heads=1).check_ulysses(4)

    with pytest.raises(ValueError, match="leaves 2 on each of 2 tensor-parallel ranks, fewer than"):
        replace(GPT2, num_key_value_heads=1).check_ulysses(4, tp_size=2)
