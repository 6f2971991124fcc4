"""Batches and samples that grow, in a pipeline: its losses are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from layouts import always
from recorded_runs import Recorder, train_each
from tiny_run import make_store, tiny_config

from mds_kernels.testing import TOLERANCES, run_ranks
from mds_train.config import TrainConfig

pytestmark = pytest.mark.timeout(400)

SCHEDULES = always(["1f1b"], ["gpipe", "zb-h1", "zb-v", "interleaved-1f1b"])


def growing(folder: Path, name: str, **parallel: object) -> TrainConfig:
    """Batches of 4, 8, then 12 samples of 4 to 16 tokens: shapes that a pipeline meets anew."""
    return tiny_config(
        folder / "store",
        folder / name,
        model={"num_layers": 4},
        train={
            "train_steps": 8,
            "global_batch_size": 12,
            "rampup_batch_size": (4, 4, 16),
            "micro_batch_size": 1,
        },
        data={
            "curriculum_start_length": 4,
            "curriculum_steps": 7,
            "curriculum_multiple": 2,
        },
        parallel=parallel,
        checkpoint={"save_final": False},
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorder]:
    folder = tmp_path_factory.mktemp("growth")
    make_store(folder)
    one = run_ranks(train_each, 1, [growing(folder, "one")])[0]
    staged = [growing(folder, name, pp_size=2, schedule=name) for name in SCHEDULES]
    both = run_ranks(train_each, 2, staged, timeout=300)
    return {"one": one[0]} | dict(zip(SCHEDULES, both[0], strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_are_those_of_one_process(found: dict[str, Recorder], schedule: str) -> None:
    expected, steps = found["one"].steps, found[schedule].steps

    assert [(s.batch_samples, s.seq_length) for s in steps][:3] == [(4, 4), (4, 6), (8, 8)]
    assert len({(s.batch_samples, s.seq_length) for s in steps}) == 7
    assert steps[-1].batch_samples == 12
    tolerance = TOLERANCES["layout_loss_float32"]
    assert [s.loss for s in steps] == pytest.approx([s.loss for s in expected], rel=tolerance)
    assert [s.grad_norm for s in steps] == pytest.approx([s.grad_norm for s in expected], rel=1e-5)
