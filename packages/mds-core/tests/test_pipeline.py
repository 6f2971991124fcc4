"""Stages on several ranks train the model that one process trains, in every order of passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from core_cells import GPT2, LLAMA_GQA, AdamW, Cell, Trace, build, whole
from pipeline_cells import LENGTH, PipelineCell, big_batch, joined, train_pipelines

from mds_core.config import Execution
from mds_core.groups import Layout, ProcessGroups
from mds_core.models import GPT
from mds_core.pipeline import SCHEDULES, Pipeline
from mds_core.rng import DropoutKey
from mds_kernels.testing import TOLERANCES, relative_error, run_ranks

DEEP = replace(GPT2, num_layers=4, hidden_dropout=0.2)
DEEP_LLAMA = replace(LLAMA_GQA, num_layers=5)
CELLS = {name: PipelineCell(cell=Cell(config=DEEP), schedule=name) for name in SCHEDULES} | {
    "uneven": PipelineCell(cell=Cell(config=DEEP_LLAMA), sizes=(4, 1)),
    "uneven-zb-v": PipelineCell(cell=Cell(config=DEEP_LLAMA), schedule="zb-v", sizes=(1, 2, 1, 1)),
    "lengths": PipelineCell(cell=Cell(config=DEEP), lengths=(LENGTH, 10, LENGTH)),
    "recompute": PipelineCell(
        cell=Cell(config=DEEP, execution=Execution(recompute="full")), schedule="zb-h1"
    ),
}
TP2 = {
    "tp2-1f1b": PipelineCell(cell=Cell(config=DEEP, execution=Execution(sequence_parallel=True))),
    "tp2-zb-h1": PipelineCell(cell=Cell(config=DEEP_LLAMA), schedule="zb-h1"),
}


def one_process(pipeline_cell: PipelineCell) -> tuple[Trace, float]:
    """The same batches in one piece, and the loss sum of the last with the final parameters."""
    cell = replace(pipeline_cell.cell, execution=Execution())
    model = build(cell, ProcessGroups.single())
    optimizer = AdamW(model.parameters())
    trace = Trace(losses=[], gradients=[], parameters=[])
    for step, length in enumerate(pipeline_cell.lengths):
        batch = big_batch(cell.config, step, length)
        key = DropoutKey(seed=7, samples=batch.pop("samples"))
        count = batch["loss_mask"].sum()
        loss = model(**batch, dropout_key=key).loss_sum / count
        model.zero_grad()
        loss.backward()
        trace.losses.append(loss.item())
        trace.gradients.append(
            whole(model, {name: p.grad.clone() for name, p in model.named_parameters()})
        )
        optimizer.step()
        trace.parameters.append(whole(model, dict(model.named_parameters())))
    return trace, model.eval()(**batch)


@pytest.fixture(scope="module")
def two_stages() -> list[dict]:
    return run_ranks(train_pipelines, 2, CELLS, Layout(pp_size=2))


@pytest.fixture(scope="module")
def two_by_two() -> list[dict]:
    return run_ranks(train_pipelines, 4, TP2, Layout(tp_size=2, pp_size=2))


def check(pipeline_cell: PipelineCell, ranks: list[dict]) -> None:
    actual = joined(ranks)
    expected, evaluated = one_process(pipeline_cell)
    tolerance = TOLERANCES["layout_float64"]
    assert actual.losses == pytest.approx(expected.losses, rel=tolerance)
    for kind in ("gradients", "parameters"):
        for got, want in zip(getattr(actual, kind), getattr(expected, kind), strict=True):
            assert got.keys() == want.keys()
            for name in want:
                assert relative_error(got[name], want[name]) <= tolerance, (kind, name)
    for rank in ranks:
        assert rank["evaluated"] == pytest.approx(evaluated.loss_sum.item(), rel=tolerance)
        if rank["losses"] is not None:
            torch.testing.assert_close(rank["losses"], evaluated.losses)
    assert sum(rank["losses"] is not None for rank in ranks) == len(ranks) // 2


@pytest.mark.parametrize("name", CELLS)
def test_two_stages_train_what_one_process_trains(name, two_stages) -> None:
    check(CELLS[name], [rank[name] for rank in two_stages])


@pytest.mark.parametrize("name", TP2)
def test_two_stages_of_two_ranks_train_what_one_process_trains(name, two_by_two) -> None:
    check(TP2[name], [rank[name] for rank in two_by_two])


def test_a_tied_table_is_owned_once(two_stages) -> None:
    name = "embedding.word_embeddings.weight"
    assert [rank["1f1b"]["copies"] for rank in two_stages] == [frozenset(), frozenset({name})]
    assert [rank["zb-v"]["copies"] for rank in two_stages] == [frozenset(), frozenset()]
    assert [rank["uneven"]["copies"] for rank in two_stages] == [frozenset(), frozenset()]


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
