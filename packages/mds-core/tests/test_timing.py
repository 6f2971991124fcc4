"""The cost of a layer is that of running it forward and backward, whatever the clock counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from core_cells import BERT, DROPPING, MIXTRAL, T5_SHAPE
from pipeline_cells import big_batch
from torch.utils.flop_counter import FlopCounterMode

from mds_core.groups import ProcessGroups
from mds_core.partition import balance
from mds_core.pipeline import layer_seconds


def operations(config) -> tuple[float, ...]:
    """What every layer costs where the clock counts operations of matrix products."""
    with FlopCounterMode(display=False) as counter:
        return layer_seconds(
            config,
            ProcessGroups.single(),
            big_batch(config, 0),
            repeats=1,
            clock=counter.get_total_flops,
        )


def test_all_layers_and_heads_are_run_once_forward_and_backward() -> None:
    # A vocabulary without padding, whose rows would be multiplied too.
    config = replace(BERT, num_layers=3, vocab_size=104, binary_head=False, **DROPPING)

    first, middle, last = operations(config)

    assert first == middle < last
    assert first + middle + last == 8 * 16 * config.flops_per_token(16)


def test_layers_of_both_stacks_and_with_experts_have_their_own_costs() -> None:
    *encoder, decoder = operations(T5_SHAPE)
    routed, plain = operations(replace(MIXTRAL, num_experts=None, layer_experts=(4, 0)))
    head = 6 * 8 * 16 * MIXTRAL.vocab_size * MIXTRAL.hidden_size

    assert encoder[0] == encoder[1] != decoder > 0
    assert routed > plain - head > 0


@pytest.mark.parametrize("config", [BERT, T5_SHAPE, MIXTRAL])
def test_stages_are_cut_by_measured_time(config) -> None:
    batch = big_batch(config, 0)

    costs = layer_seconds(config, ProcessGroups.single(), batch, dtype=torch.float64, repeats=1)

    assert len(costs) == config.stacked_layers
    assert min(costs) > 0
    assert len(balance(costs, count=2)) == 2
