"""Adapters and students of a teacher are trained on any layout as on one process."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from layouts import Layout, always
from recorded_runs import Recorder, checkpoint_differences, train_and_record
from tiny_run import make_store, tiny_config

from mds_kernels.testing import TOLERANCES, run_ranks
from mds_train.config import DistillConfig, LoraConfig, TrainConfig

pytestmark = pytest.mark.timeout(400)

LAYOUTS = always(
    [
        Layout(2, 2, 2, sequence_parallel=True, recompute="full"),
        Layout(2, 1, 3),
        Layout(2, 1, 1, pp_size=2, schedule="zb-h1"),
    ],
    [
        Layout(2, 1, 0, "bf16", pp_size=2),
        Layout(4, 1, 1, pp_size=2),
        Layout(4, 2, 1, pp_size=2, schedule="zb-h1", sequence_parallel=True),
        Layout(2, 1, 0, ulysses_size=2, sequence_sharing="ring"),
        Layout(1, 1, 1),
        Layout(1, 1, 2, "bf16"),
        Layout(1, 1, 3, "bf16"),
        Layout(2, 1, 1, "bf16"),
        Layout(2, 1, 2),
        Layout(2, 2, 0),
        Layout(2, 2, 0, "bf16"),
        Layout(2, 2, 1, sequence_parallel=True),
        Layout(2, 1, 1, ulysses_size=2),
        Layout(2, 1, 2, offload_optimizer="cpu"),
        Layout(4, 2, 3),
        Layout(4, 2, 1, ulysses_size=2, sequence_parallel=True),
    ],
)
PRECISIONS = sorted({layout.precision for layout in LAYOUTS})


def train_or_resume(configs: Sequence[TrainConfig]) -> list[Recorder]:
    """Runs whose folder has checkpoints go on."""
    return [
        train_and_record(config, resume=(Path(config.train.run_dir) / "checkpoints").is_dir())
        for config in configs
    ]


def adapting(folder: Path, name: str, layout: Layout, *, exit_step: int | None) -> TrainConfig:
    config = tiny_config(
        folder / "store",
        folder / name,
        train={"precision": layout.precision, "exit_step": exit_step},
        parallel=layout.parallel,
        memory=layout.memory,
        optimizer={"lr": 1e-2},
        checkpoint={"load": str(folder / "base"), "load_weights_only": True},
    )
    return replace(config, lora=LoraConfig(rank=4, alpha=8.0, dropout=0.1))


def learning(folder: Path, name: str, layout: Layout) -> TrainConfig:
    """A student of another shape than its teacher, the base."""
    config = tiny_config(
        folder / "store",
        folder / f"{name}-student",
        model={"num_layers": 2, "hidden_size": 48},
        train={"precision": layout.precision, "train_steps": 3},
        parallel=layout.parallel,
        memory=layout.memory,
    )
    teacher = DistillConfig(teacher=str(folder / "base"), beta=2.0, temperature=2.0, until_step=2)
    return replace(config, distill=teacher)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorder]:
    """One process: three steps, and three more; on each layout the same three more."""
    folder = tmp_path_factory.mktemp("adapters")
    make_store(folder)
    base = tiny_config(folder / "store", folder / "base", train={"train_steps": 3})
    alone = [Layout(1, 1, 0, precision) for precision in PRECISIONS]
    halves = [adapting(folder, f"half-{one.precision}", one, exit_step=3) for one in alone]
    wholes = [adapting(folder, f"whole-{one.precision}", one, exit_step=None) for one in alone]
    students = [learning(folder, f"alone-{one.precision}", one) for one in alone]
    todo = [base, *halves, *wholes, *students]
    recorded = run_ranks(train_or_resume, 1, todo, timeout=300)[0][-2 * len(alone) :]
    names = [f"{run}-{one.precision}" for run in ("whole", "student") for one in alone]
    found = dict(zip(names, recorded, strict=True))
    for ranks in sorted({layout.ranks for layout in LAYOUTS}):
        own = [layout for layout in LAYOUTS if layout.ranks == ranks]
        for layout in own:
            shutil.copytree(folder / f"half-{layout.precision}", folder / layout.name)
        configs = [adapting(folder, layout.name, layout, exit_step=None) for layout in own]
        configs += [learning(folder, layout.name, layout) for layout in own]
        every_rank = run_ranks(train_or_resume, ranks, configs, timeout=400)
        names = [layout.name + kind for kind in ("", "-student") for layout in own]
        found |= dict(zip(names, every_rank[0], strict=True))
    found["folder"] = folder  # type: ignore[assignment]
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_losses_and_norms_go_on_as_on_one_process(
    runs: dict[str, Recorder], layout: Layout
) -> None:
    found, whole = runs[layout.name].steps, runs[f"whole-{layout.precision}"].steps[3:]

    exact = layout.precision == "fp32"
    tolerance = TOLERANCES["layout_loss_float32" if exact else "layout_loss_bfloat16"]
    losses = [step.loss for step in whole]
    assert [step.loss for step in found] == pytest.approx(losses, rel=tolerance)
    norms = [step.grad_norm for step in whole]
    assert [step.grad_norm for step in found] == pytest.approx(norms, rel=1e-5 if exact else 3e-2)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_students_have_the_losses_of_one_process(runs: dict[str, Recorder], layout: Layout) -> None:
    found, alone = runs[f"{layout.name}-student"].steps, runs[f"student-{layout.precision}"].steps

    kind = "layout_loss_float32" if layout.precision == "fp32" else "layout_loss_bfloat16"
    for step, wanted in zip(found, alone, strict=True):
        assert step.loss == pytest.approx(wanted.loss, rel=TOLERANCES[kind])
        apart = wanted.loss_terms["teacher"]
        assert step.loss_terms["teacher"] == pytest.approx(apart, rel=20 * TOLERANCES[kind])
    assert [step.loss_terms["teacher"] > 0 for step in found] == [True, True, False]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_layout_goes_on_bitwise(runs: dict[str, Recorder], precision: str) -> None:
    folder = Path(str(runs["folder"]))
    half = folder / f"half-{precision}" / "checkpoints" / "step-3"
    config = adapting(folder, f"again-{precision}", Layout(1, 1, 0, precision), exit_step=None)
    shutil.copytree(half.parents[1], folder / f"again-{precision}")

    (again,) = run_ranks(train_or_resume, 1, [config])[0]

    assert again.losses == runs[f"whole-{precision}"].losses[3:]
    written = [folder / f"{name}-{precision}" / "checkpoints/step-6" for name in ("again", "whole")]
    assert checkpoint_differences(*written) == []
