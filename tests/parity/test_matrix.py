"""Models x layouts x schedules x recomputation against one process, in float64.

A few run always; all of them with the environment variable MDS_PARITY=full, as `nox -s parity`
sets it.
"""

from __future__ import annotations

import os
from dataclasses import replace

import core_cells
import pipeline_cells
import pytest
from core_cells import AdamW, Cell, Trace, build, whole
from matrix_cells import (
    LAYOUTS,
    PIPELINES,
    cells_of,
    pipelines_of,
    train_layout,
    train_pipelines,
)
from pipeline_cells import PipelineCell, big_batch, mean_loss

from mds_core.config import Execution
from mds_core.groups import Layout, ProcessGroups
from mds_core.rng import DropoutKey
from mds_kernels.testing import TOLERANCES, relative_error, run_ranks

pytestmark = pytest.mark.timeout(900)

FULL = os.environ.get("MDS_PARITY") == "full"
WHY = "one of many layouts; nox -s parity runs them all"
ALWAYS = {"tp2ring2ep2"}
FEW = ["zb-h1/gpt/modules", "1f1b/moe/full"]


def differences(actual: Trace, expected: Trace) -> dict[str, float]:
    """Relative differences of gradients and parameters that are too large."""
    found = {}
    for kind in ("gradients", "parameters"):
        for got, want in zip(getattr(actual, kind), getattr(expected, kind), strict=True):
            assert got.keys() == want.keys()
            found |= {(kind, name): relative_error(got[name], want[name]) for name in want}
    return {key: value for key, value in found.items() if not value <= TOLERANCES["layout_float64"]}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.skipif(not FULL and name not in ALWAYS, reason=WHY))
        for name in LAYOUTS
    ],
)
def test_a_layout_trains_every_model_that_one_process_trains(layout) -> None:
    cells = cells_of(layout)
    plain = {name: replace(cell, execution=Execution()) for name, cell in cells.items()}
    expected = core_cells.train_all(plain, Layout())

    ranks = run_ranks(train_layout, LAYOUTS[layout].world_size, layout, timeout=600)

    assert len(cells) >= 3
    wrong = {name: differences(ranks[0][name], expected[name]) for name in cells}
    assert not {name: found for name, found in wrong.items() if found}
    for name in cells:
        losses = expected[name].losses
        assert ranks[0][name].losses == pytest.approx(losses, rel=TOLERANCES["layout_float64"])


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.skipif(not FULL and name != "tp2pp2dp2", reason=WHY))
        for name in PIPELINES
    ],
)
def test_a_pipeline_trains_what_one_process_trains(layout) -> None:
    cells = pipelines_of(layout)
    names = [name for name in cells if FULL or name in FEW]

    ranks = run_ranks(train_pipelines, PIPELINES[layout].world_size, layout, names, timeout=800)

    assert names
    references: dict[str, Trace] = {}
    wrong = {}
    for name in names:
        model = name.split("/")[1]
        references.setdefault(model, one_process(cells[name]))
        actual = pipeline_cells.joined([rank[name] for rank in ranks])
        if found := differences(actual, references[model]):
            wrong[name] = found
    assert not wrong


def one_process(pipeline_cell: PipelineCell) -> Trace:
    """The same batch in one piece."""
    cell: Cell = replace(pipeline_cell.cell, execution=Execution())
    model = build(cell, ProcessGroups.single())
    batch = big_batch(cell.config, 0)
    count = batch["loss_mask"].sum()
    key = DropoutKey(seed=7, samples=batch.pop("samples"))
    loss = mean_loss(model(**batch, dropout_key=key), count)
    loss.backward()
    parameters = dict(model.named_parameters())
    gradients = whole(model, {name: p.grad.clone() for name, p in parameters.items()})
    AdamW(model.parameters()).step()
    return Trace(losses=[loss.item()], gradients=[gradients], parameters=[whole(model, parameters)])
