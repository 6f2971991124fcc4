"""Ranks that share key/value heads hold every row of the projection once."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from core_cells import GPT2

from mds_core.layers import few_heads


class FakeGroup(NamedTuple):
    """A rank of a group, as far as arithmetic asks for it."""

    number: int
    ranks: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.ranks


def rows_of(config, ranks: int, rows) -> list[int]:
    return [
        row
        for number in range(ranks)
        for start, stop in rows(config, FakeGroup(number, ranks))
        for row in range(start, stop)
    ]


@pytest.mark.parametrize(("heads", "ranks"), [(1, 2), (1, 4), (2, 4), (2, 8)])
def test_every_row_belongs_to_one_rank(heads, ranks) -> None:
    config = replace(GPT2, num_attention_heads=8, num_key_value_heads=heads, head_dim=12)

    both = rows_of(config, ranks, few_heads.query_key_value_rows)
    pairs = rows_of(config, ranks, few_heads.key_value_rows)

    assert few_heads.sharers(config, FakeGroup(0, ranks)) == ranks // heads
    assert sorted(both) == list(range((8 + 2 * heads) * 12))
    assert sorted(pairs) == list(range(2 * heads * 12))


def test_a_rank_has_the_queries_that_look_at_its_head() -> None:
    config = replace(GPT2, num_attention_heads=8, num_key_value_heads=2, head_dim=4)

    queries, key, value = few_heads.query_key_value_rows(config, FakeGroup(3, 4))

    assert queries == (24 + 8, 24 + 16)  # the last two of the second head's four
    assert (key, value) == ((24 + 16 + 2, 24 + 20), (24 + 20 + 2, 24 + 24))


def test_parts_of_a_head_are_joined_in_order() -> None:
    heads = torch.arange(2 * 2 * 6.0).view(2, 2, 6)  # of two heads the key and the value
    parts = [heads[rank // 2, :, (rank % 2) * 3 : (rank % 2 + 1) * 3] for rank in range(4)]
    every = torch.cat([part.reshape(1, 1, -1) for part in parts], dim=-1)

    for rank in range(4):
        with mock.patch.object(few_heads, "gather_partial", return_value=every):
            whole = few_heads.whole_heads(every, tp=FakeGroup(rank, 4), ranks=2)
        assert torch.equal(whole.flatten(), heads[rank // 2].flatten())
