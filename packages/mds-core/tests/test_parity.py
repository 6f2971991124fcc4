"""Any split over tensor-parallel ranks trains the model that one process trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from core_cells import GPT2, LLAMA_GQA, QWEN3, Cell, Trace, train_all

from mds_core.config import Execution
from mds_core.groups import Layout
from mds_kernels.testing import TOLERANCES, relative_error, run_ranks

DROPPING = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
CELLS = {
    "gpt": Cell(config=GPT2),
    "gpt-dropout": Cell(config=replace(GPT2, **DROPPING)),
    "gpt-sequence-parallel-dropout-full": Cell(
        config=replace(GPT2, **DROPPING),
        execution=Execution(sequence_parallel=True, recompute="full"),
    ),
    "llama-gqa": Cell(config=LLAMA_GQA),
    "llama-gqa-sequence-parallel-selective": Cell(
        config=LLAMA_GQA, execution=Execution(sequence_parallel=True, recompute="selective")
    ),
    "qwen3": Cell(config=QWEN3),
    "gpt-fp32": Cell(config=GPT2, dtype=torch.float32),
    "llama-gqa-fp32": Cell(config=LLAMA_GQA, dtype=torch.float32),
}
BROKEN = {"broken": Cell(config=LLAMA_GQA, broken="_Copy", steps=1)}
TP4 = {name: CELLS[name] for name in ("gpt-sequence-parallel-dropout-full", "llama-gqa")}


@pytest.fixture(scope="module")
def one_process() -> dict[str, Trace]:
    plain = {name: replace(cell, execution=Execution()) for name, cell in CELLS.items()}
    return train_all(plain, Layout())


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, Trace]:
    first, second = run_ranks(train_all, 2, CELLS | BROKEN, Layout(tp_size=2))
    assert all(first[name].losses == second[name].losses for name in CELLS)
    return first


@pytest.fixture(scope="module")
def four_ranks() -> dict[str, Trace]:
    return run_ranks(train_all, 4, TP4, Layout(tp_size=4))[0]


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
    assert worst_difference(two_ranks[name], one_process[name]) <= TOLERANCES["layout_float64"]


@pytest.mark.parametrize("name", TP4)
def test_four_ranks_train_what_one_process_trains(name, one_process, four_ranks) -> None:
    assert worst_difference(four_ranks[name], one_process[name]) <= TOLERANCES["layout_float64"]


@pytest.mark.parametrize("name", [name for name in CELLS if name.endswith("fp32")])
def test_fp32_losses_of_two_ranks_are_those_of_one_process(name, one_process, two_ranks) -> None:
    for got, want in zip(two_ranks[name].losses, one_process[name].losses, strict=True):
        assert got == pytest.approx(want, rel=TOLERANCES["layout_loss_float32"])


def test_dropout_changes_the_loss(one_process) -> None:
    assert one_process["gpt"].losses[0] != one_process["gpt-dropout"].losses[0]


def test_the_check_fails_when_an_all_reduce_is_left_out(one_process, two_ranks) -> None:
    broken, reference = two_ranks["broken"], one_process["llama-gqa"]

    assert broken.losses[0] == pytest.approx(reference.losses[0])
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    assert relative_error(broken.gradients[0][name], reference.gradients[0][name]) > 1e-3
