from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from core_cells import BERT, GPT2, LLAMA_GQA, T5_SHAPE
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Size

from mds_core.groups import ProcessGroups
from mds_core.models import GPT, T5, Bert
from mds_core.partition import Stage, balance, balance_split, parameter_costs, stages_of

COSTS = st.lists(st.floats(0.1, 10), min_size=1, max_size=8)


@given(COSTS, st.data())
@settings(deadline=None, max_examples=80)
def test_the_dearest_stage_is_as_cheap_as_any_cut_allows(costs, data) -> None:
    count = data.draw(st.integers(1, len(costs)))

    stages = balance(costs, count=count)

    def dearest(bounds):
        return max(sum(costs[start:stop]) for start, stop in pairwise(bounds))

    best = min(
        dearest([0, *cuts, len(costs)]) for cuts in combinations(range(1, len(costs)), count - 1)
    )
    bounds = [stages[0].layers.start, *(stage.layers.stop for stage in stages)]
    assert dearest(bounds) <= best * (1 + 1e-9)
    assert bounds[0] == 0
    assert bounds[-1] == len(costs)
    assert all(stage.layers for stage in stages)


def test_equal_layers_are_spread_evenly() -> None:
    assert [len(stage.layers) for stage in balance([1.0] * 10, count=4)] in (
        [3, 3, 2, 2],
        [2, 2, 3, 3],
        [2, 3, 3, 2],
        [3, 2, 2, 3],
        [2, 3, 2, 3],
        [3, 2, 3, 2],
    )


def test_a_dear_embedding_leaves_its_stage_fewer_layers() -> None:
    stages = balance([5.0, 1, 1, 1, 1, 1], count=2)

    assert [len(stage.layers) for stage in stages] == [1, 5]


def test_a_cut_between_two_stacks_is_kept() -> None:
    stages = balance_split([1.0, 1, 1, 1, 3, 1], counts=(1, 2), at=4)

    assert [stage.layers for stage in stages] == [range(4), range(4, 5), range(5, 6)]


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (GPT, GPT2),
        (GPT, LLAMA_GQA),
        (Bert, replace(BERT, embedding_norm=True)),
        (Bert, replace(BERT, binary_head=False)),
        (T5, replace(T5_SHAPE, decoder_num_layers=2, embedding_norm=True)),
    ],
)
def test_parameter_costs_are_the_parameters_of_the_stages(kind, config) -> None:
    costs = parameter_costs(config)

    for stage in stages_of([1] * config.stacked_layers):
        model = kind(config, ProcessGroups.single(), device="meta", stage=stage)
        shards = model.parameter_shards().values()
        assert costs[stage.index] == sum(Size(shard.global_shape).numel() for shard in shards)


def test_stages_know_their_ends() -> None:
    first, last = stages_of([2, 1])

    assert (first.first, first.last, last.first, last.last) == (True, False, False, True)
    assert Stage.whole(3) == stages_of([3])[0]


def test_impossible_partitions_are_refused() -> None:
    with pytest.raises(ValueError, match="2 layers do not make 3 stages"):
        balance([1.0, 1.0], count=3)
    with pytest.raises(ValueError, match=r"stage sizes \[2, 0\]: every stage needs at least one"):
        stages_of([2, 0])
