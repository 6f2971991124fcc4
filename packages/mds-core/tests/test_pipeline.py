"""Stages on several ranks train the model that one process trains, in every order of passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from core_cells import GPT2, AdamW, Cell, Trace, build, trained, whole
from pipeline_cells import (
    CELLS,
    DISTILLATION,
    HALF,
    PP4,
    SUMS,
    TP2,
    ULYSSES,
    PipelineCell,
    big_batch,
    enlarge,
    joined,
    mean_loss,
    teacher_of,
)

from mds_core.config import Execution
from mds_core.groups import Layout, ProcessGroups
from mds_core.models import GPT, DistilledGPT
from mds_core.models.context import document_numbers
from mds_core.pipeline import SCHEDULES, Pipeline
from mds_core.rng import DropoutKey
from mds_kernels.testing import TOLERANCES, relative_error


def one_process(pipeline_cell: PipelineCell) -> tuple[Trace, float, torch.Tensor]:
    """The same batches in one piece; of the last the loss and losses with final parameters."""
    cell = replace(pipeline_cell.cell, execution=Execution())
    model = build(cell, ProcessGroups.single())
    if pipeline_cell.taught:
        model = student(cell)
    parameters = trained(model)
    optimizer = AdamW(parameters.values())
    trace = Trace(losses=[], gradients=[], parameters=[])
    for step, length in enumerate(pipeline_cell.lengths):
        batch = big_batch(cell.config, step, length)
        key = DropoutKey(seed=7, samples=batch.pop("samples"))
        count = batch["loss_mask"].sum()
        found = model(**batch, dropout_key=key)
        loss = mean_loss(found, count)
        model.zero_grad()
        apart = getattr(found, "divergence_sum", 0.0) / count
        (loss + apart).backward()
        trace.losses.append(loss.item())
        trace.gradients.append(
            whole(model, {name: p.grad.clone() for name, p in parameters.items()})
        )
        optimizer.step()
        trace.parameters.append(whole(model, parameters))
    evaluated = model.eval()(**batch)
    return trace, mean_loss(evaluated, count).item(), evaluated.losses


def student(cell: Cell) -> DistilledGPT:
    """The model of a cell beside the teacher of the pipelines."""
    model = DistilledGPT(cell.config, ProcessGroups.single(), seed=7, dtype=cell.dtype)
    teacher = GPT(teacher_of(cell.config), ProcessGroups.single(), seed=7, dtype=cell.dtype)
    for each in (model, teacher):
        enlarge(dict(each.named_parameters()), factor=cell.std_factor)
    model.set_teacher(teacher, DISTILLATION)
    return model


def check(pipeline_cell: PipelineCell, ranks: list[dict]) -> None:
    actual = joined(ranks)
    expected, evaluated, losses = one_process(pipeline_cell)
    tolerance = TOLERANCES["layout_float64"]
    assert actual.losses == pytest.approx(expected.losses, rel=tolerance)
    for kind in ("gradients", "parameters"):
        for got, want in zip(getattr(actual, kind), getattr(expected, kind), strict=True):
            assert got.keys() == want.keys()
            for name in want:
                assert relative_error(got[name], want[name]) <= tolerance, (kind, name)
    for rank in ranks:
        assert rank["evaluated"] == pytest.approx(evaluated, rel=tolerance)
        if rank["losses"] is not None:
            torch.testing.assert_close(rank["losses"], losses)
    assert any(rank["losses"] is not None for rank in ranks)
    assert any(rank["losses"] is None for rank in ranks)


@pytest.mark.parametrize("name", CELLS)
def test_two_ranks_train_what_one_process_trains(name, two_ranks) -> None:
    check(CELLS[name], [rank[name] for rank in two_ranks])


@pytest.mark.parametrize("name", PP4)
def test_a_decoder_that_begins_on_an_inner_rank_trains_the_same(name, four_ranks) -> None:
    check(PP4[name], [rank[name] for rank in four_ranks])


@pytest.mark.parametrize("name", TP2 | ULYSSES)
def test_two_ranks_of_two_ranks_train_what_one_process_trains(name, four_ranks) -> None:
    check((TP2 | ULYSSES)[name], [rank[name] for rank in four_ranks])


def test_the_check_fails_when_the_tied_gradients_are_not_summed(two_ranks) -> None:
    name = "embedding.word_embeddings.weight"
    reference = one_process(CELLS["1f1b"])[0].gradients[0][name]

    for rank in two_ranks:
        broken = rank["unsummed"]["trace"].gradients[0][name]
        assert relative_error(broken, reference) > 1e-3


def test_bfloat16_stages_stay_close_to_one_float32_process(two_ranks) -> None:
    exact = replace(HALF, cell=replace(HALF.cell, dtype=torch.float32))
    reference = one_process(exact)[0]

    actual = joined([rank["half"] for rank in two_ranks])

    assert actual.losses[0] == pytest.approx(
        reference.losses[0], rel=TOLERANCES["layout_loss_bfloat16"]
    )
    for name, gradient in reference.gradients[0].items():
        assert actual.gradients[0][name].dtype == torch.bfloat16
        assert relative_error(actual.gradients[0][name].float(), gradient) < 0.05, name


@pytest.mark.parametrize("sums", ["fp32", "bf16"])
def test_gradients_of_bfloat16_stages_can_be_summed_in_float32(sums, two_ranks) -> None:
    """One bfloat16 process computes each micro batch, and the sum is taken in float64."""
    cell = SUMS["sums-fp32"]
    model = build(cell.cell, ProcessGroups.single())
    batch = big_batch(cell.cell.config, 0)
    count = batch["loss_mask"].sum()
    documents = document_numbers(batch.pop("cumulative_lengths"), tokens=batch["tokens"])
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.grad_dtype = torch.float32  # a norm's gradient is then not rounded either
    expected = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
    for row in range(len(documents)):
        one = {name: tensor[row : row + 1] for name, tensor in batch.items()}
        hidden = model.forward_stage(
            one["tokens"],
            position_ids=torch.arange(one["tokens"].size(1))[None],
            documents=documents[row : row + 1],
        )
        model.zero_grad()
        (model.loss(hidden, one["labels"], one["loss_mask"]).loss_sum / count).backward()
        for name, parameter in parameters.items():
            expected[name] += parameter.grad.double()

    actual = joined([rank[f"sums-{sums}"] for rank in two_ranks]).gradients[0]

    whole_sums = whole(model, expected)
    worst = max(relative_error(actual[name], whole_sums[name]) for name in actual)
    assert worst < 1e-6 if sums == "fp32" else worst > 1e-3


def test_waiting_weight_gradients_and_recomputation_repeat_no_matrix_product(two_ranks) -> None:
    flops = {name: sum(rank["flops"][name] for rank in two_ranks) for name in two_ranks[0]["flops"]}

    assert flops["zb-h1/none"] == flops["1f1b/none"]
    assert flops["zb-h1/full"] == flops["1f1b/full"]
    assert flops["zb-h1/modules"] == flops["1f1b/modules"] == flops["1f1b/none"]
    assert flops["1f1b/full"] == pytest.approx(4 / 3 * flops["1f1b/none"])  # one more forward


def test_gradients_of_two_steps_add_up_also_for_a_tied_table(two_ranks) -> None:
    for rank in two_ranks:
        once, twice = rank["accumulated"]
        torch.testing.assert_close(twice, 2 * once)


def test_a_tied_table_is_owned_once(two_ranks) -> None:
    name = "embedding.word_embeddings.weight"
    assert [rank["1f1b"]["copies"] for rank in two_ranks] == [frozenset(), frozenset({name})]
    assert [rank["zb-v"]["copies"] for rank in two_ranks] == [frozenset(), frozenset()]
    assert [rank["uneven"]["copies"] for rank in two_ranks] == [frozenset(), frozenset()]


def test_a_pipeline_of_one_rank_and_a_whole_model_on_several_are_refused() -> None:
    with pytest.raises(ValueError, match="a pipeline needs pp_size of at least 2"):
        Pipeline(GPT2, ProcessGroups.single(), micro_batches=2)
    groups = ProcessGroups(layout=Layout(pp_size=2), rank=0)
    with pytest.raises(ValueError, match="GPT would build the whole model on each"):
        GPT(GPT2, groups)


@pytest.mark.parametrize(
    ("name", "count", "message"),
    [
        ("1f1b", 3, "needs at least 4 micro batches with 4 pipeline ranks, and there are 3"),
        ("dualpipe-v", 7, "needs at least 8 micro batches"),
        ("interleaved-zb", 9, "9 do not divide; choose a multiple of 4"),
    ],
)
def test_too_few_micro_batches_are_refused(name, count, message) -> None:
    with pytest.raises(ValueError, match=message):
        SCHEDULES[name].check_micro_batches(count, pp_size=4)


def test_chunks_belong_to_interleaved_schedules() -> None:
    assert SCHEDULES["interleaved-1f1b"].stages_per_rank(4) == 4
    with pytest.raises(ValueError, match="schedule zb-v holds 2 stages on each rank, not 3"):
        SCHEDULES["zb-v"].stages_per_rank(3)
    with pytest.raises(ValueError, match="schedule 1f1b holds 1 stage on each rank, not 2"):
        SCHEDULES["1f1b"].stages_per_rank(2)


def test_stages_stand_where_their_schedule_wants_them() -> None:
    def places(name, chunks):
        return [SCHEDULES[name].stage_indices(r, pp_size=3, chunks=chunks) for r in range(3)]

    assert places("1f1b", 1) == [(0,), (1,), (2,)]
    assert places("interleaved-1f1b", 2) == [(0, 3), (1, 4), (2, 5)]
    assert places("zb-v", 2) == [(0, 5), (1, 4), (2, 3)]
