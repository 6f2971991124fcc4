"""Any split over tensor-parallel ranks trains the model that one process trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_cells import CELLS, TP4, Trace, train_all

from mds_core.config import Execution
from mds_core.groups import Layout
from mds_kernels.testing import TOLERANCES, relative_error


@pytest.fixture(scope="module")
def one_process() -> dict[str, Trace]:
    plain = {name: replace(cell, execution=Execution()) for name, cell in CELLS.items()}
    return train_all(plain, Layout())


def worst_difference(actual: Trace, reference: Trace) -> float:
    """Largest relative difference of any gradient or parameter in any step."""
    return max(
        relative_error(got[name], want[name])
        for got, want in zip(
            actual.gradients + actual.parameters,
            reference.gradients + reference.parameters,
            strict=True,
        )
        for name in want
    )


@pytest.mark.parametrize("name", [name for name in CELLS if not name.endswith("fp32")])
def test_two_ranks_train_what_one_process_trains(name, one_process, two_ranks) -> None:
    assert worst_difference(two_ranks[0][name], one_process[name]) <= TOLERANCES["layout_float64"]


@pytest.mark.parametrize("name", TP4)
def test_four_ranks_train_what_one_process_trains(name, one_process, four_ranks) -> None:
    assert worst_difference(four_ranks[0][name], one_process[name]) <= TOLERANCES["layout_float64"]


@pytest.mark.parametrize("name", [name for name in CELLS if name.endswith("fp32")])
def test_fp32_losses_of_two_ranks_are_those_of_one_process(name, one_process, two_ranks) -> None:
    for got, want in zip(two_ranks[0][name].losses, one_process[name].losses, strict=True):
        assert got == pytest.approx(want, rel=TOLERANCES["layout_loss_float32"])


def test_dropout_changes_the_loss(one_process) -> None:
    assert one_process["gpt"].losses[0] != one_process["gpt-dropout"].losses[0]


def test_the_check_fails_when_an_all_reduce_is_left_out(one_process, two_ranks) -> None:
    broken, reference = two_ranks[0]["broken"], one_process["llama-gqa"]

    assert broken.losses[0] == pytest.approx(reference.losses[0])
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    assert relative_error(broken.gradients[0][name], reference.gradients[0][name]) > 1e-3
