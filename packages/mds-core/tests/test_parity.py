"""Any split over tensor-parallel ranks trains the model that one process trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from core_cells import (
    CELLS,
    DP,
    EP,
    EP_TP2,
    EP_ULYSSES,
    LLAMA_GQA,
    RING,
    RING4,
    RING_TP2,
    TP4,
    ULYSSES,
    ULYSSES_TP2,
    UNEVEN,
    Cell,
    Trace,
    batch,
    build,
    train_all,
)

from mds_core.config import Execution
from mds_core.groups import Layout, ProcessGroups
from mds_kernels.testing import TOLERANCES, relative_error


@pytest.fixture(scope="module")
def one_process() -> dict[str, Trace]:
    plain = {name: replace(cell, execution=Execution()) for name, cell in (CELLS | UNEVEN).items()}
    return train_all(plain, Layout())


def worst_difference(actual: Trace, reference: Trace) -> float:
    """Largest relative difference of any gradient or parameter in any step."""
    return max(
        relative_error(got[name], want[name])
        for kind in ("gradients", "parameters")
        for got, want in zip(getattr(actual, kind), getattr(reference, kind), strict=True)
        for name in got.keys() | want.keys()
    )


def difference_of_first_step(actual: Trace, reference: Trace) -> float:
    """The same where the reference has run further."""
    first = Trace(
        losses=reference.losses[:1],
        gradients=reference.gradients[:1],
        parameters=reference.parameters[:1],
    )
    return worst_difference(actual, first)


@pytest.mark.parametrize("name", [name for name in CELLS if not name.endswith("fp32")])
def test_two_ranks_train_what_one_process_trains(name, one_process, two_ranks) -> None:
    assert worst_difference(two_ranks[0][name], one_process[name]) <= TOLERANCES["layout_float64"]


@pytest.mark.parametrize("name", TP4)
def test_four_ranks_train_what_one_process_trains(name, one_process, four_ranks) -> None:
    reference = one_process[name.removeprefix("tp4-")]

    assert difference_of_first_step(four_ranks[0][name], reference) <= TOLERANCES["layout_float64"]


@pytest.mark.parametrize("name", ULYSSES | RING)
def test_two_ranks_that_share_a_sequence_train_the_same(name, one_process, two_ranks) -> None:
    reference = one_process[name.partition("-")[2]]

    assert difference_of_first_step(two_ranks[0][name], reference) <= TOLERANCES["layout_float64"]


@pytest.mark.parametrize("name", ULYSSES_TP2 | RING_TP2)
def test_shared_sequences_and_split_layers_train_the_same(name, one_process, four_ranks) -> None:
    reference = one_process[name.split("-", 2)[2]]

    assert difference_of_first_step(four_ranks[0][name], reference) <= TOLERANCES["layout_float64"]


@pytest.mark.parametrize("name", [*DP, *EP])
def test_two_ranks_with_other_samples_train_the_same(name, one_process, two_ranks) -> None:
    reference = one_process[name.partition("-")[2]]

    assert worst_difference(two_ranks[0][name], reference) <= TOLERANCES["layout_float64"]
    assert two_ranks[0][name].losses == pytest.approx(reference.losses, rel=1e-12)


@pytest.mark.parametrize("name", [*EP_TP2, *EP_ULYSSES])
def test_shared_out_experts_and_split_layers_train_the_same(name, one_process, four_ranks) -> None:
    reference = one_process[name.split("-", 2)[2]]

    assert difference_of_first_step(four_ranks[0][name], reference) <= TOLERANCES["layout_float64"]


@pytest.mark.parametrize("name", RING4)
def test_four_ranks_in_a_ring_train_the_same(name, one_process, four_ranks) -> None:
    reference = one_process[name.partition("-")[2]]

    assert difference_of_first_step(four_ranks[0][name], reference) <= TOLERANCES["layout_float64"]


@pytest.mark.parametrize("sharing", ["ulysses", "ring"])
def test_every_rank_of_a_sequence_gives_all_logits_and_losses(sharing, two_ranks) -> None:
    model = build(Cell(config=LLAMA_GQA), ProcessGroups.single()).eval()
    tokens, labels, _ = batch(LLAMA_GQA, 0)

    for rank in two_ranks:
        torch.testing.assert_close(rank[sharing]["logits"], model(tokens).detach())
        torch.testing.assert_close(rank[sharing]["losses"], model(tokens, labels).losses)


def test_what_sharing_a_sequence_cannot_do_is_refused(two_ranks) -> None:
    refused, ring = two_ranks[0]["ulysses"], two_ranks[0]["ring"]

    assert "sequence length (15) is not a multiple of 2" in refused["odd"]
    assert "generate with ulysses_size=1" in refused["cached"]
    assert refused["even"] == "nothing was refused"
    assert "(14) is not a multiple of 4, twice the ranks that share" in ring["even"]


def test_the_check_fails_when_shared_sequences_sum_no_gradients(one_process, two_ranks) -> None:
    unsummed, reference = two_ranks[0]["ulysses-unsummed"], one_process["gpt"]

    assert unsummed.losses[0] == pytest.approx(reference.losses[0])
    assert difference_of_first_step(unsummed, reference) > 1e-3


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
