"""Pipelines go on from what one process wrote, and one process from what they wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from layouts import (
    Layout,
    always,
    assert_same_course,
    config_on,
    continue_on,
    step_3,
    step_of,
    straight_runs,
)
from recorded_runs import Recorder, checkpoint_differences, train_and_record, train_each
from tiny_run import make_store, tiny_config

from mds_kernels.testing import run_ranks
from mds_train.config import TrainConfig

pytestmark = pytest.mark.timeout(900)

LAYERS = 4
LAYOUTS = always(
    [
        Layout(2, 1, 1, pp_size=2),
        Layout(2, 1, 1, pp_size=2, schedule="zb-h1", recompute="full"),
        Layout(2, 1, 1, "bf16", pp_size=2, schedule="zb-v", offload_optimizer="cpu"),
        Layout(4, 2, 0, pp_size=2, sequence_parallel=True),
        Layout(8, 2, 1, pp_size=2),
    ],
    [
        Layout(2, 1, 0, pp_size=2, schedule="gpipe"),
        Layout(2, 1, 0, pp_size=2, virtual_stages=2),
        Layout(2, 1, 1, pp_size=2, schedule="zb-h1-lazy"),
        Layout(2, 1, 1, pp_size=2, schedule="interleaved-zb", offload_activations=True),
        Layout(2, 1, 1, pp_size=2, schedule="zb-v"),
        Layout(2, 1, 0, pp_size=2, schedule="dualpipe-v"),
        Layout(2, 1, 1, "bf16", pp_size=2),
        Layout(2, 1, 1, "bf16", pp_size=2, schedule="zb-v"),
        Layout(4, 2, 1, pp_size=2, sequence_parallel=True, offload_optimizer="cpu"),
        Layout(4, 1, 1, "bf16", pp_size=2, offload_optimizer="cpu"),
        Layout(2, 1, 0, "bf16", pp_size=2, schedule="zb-h1"),
        Layout(4, 1, 1, pp_size=4),
        Layout(4, 1, 1, pp_size=2, partition="1,3"),
        Layout(2, 1, 1, pp_size=2, schedule="zb-v", partition="time"),
        Layout(4, 1, 1, pp_size=2, schedule="zb-v"),
        Layout(4, 1, 1, pp_size=2, ulysses_size=2, recompute="selective"),
        Layout(8, 2, 1, "bf16", pp_size=2, schedule="zb-h1"),
    ],
)
WIDE = Layout(8, 2, 1, pp_size=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipelines")
    make_store(path)
    return path


@pytest.fixture(scope="module")
def straight(folder: Path) -> dict[str, Recorder]:
    return straight_runs(folder, layers=LAYERS)


@pytest.fixture(scope="module")
def continued(folder: Path, straight: dict[str, Recorder]) -> dict[Layout, Recorder]:
    del straight  # has written the checkpoints
    return continue_on(LAYOUTS, folder, layers=LAYERS)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_state_is_bitwise_the_saved_one(
    folder: Path, continued: dict[Layout, Recorder], layout: Layout
) -> None:
    assert len(continued[layout].losses) == 3
    again = step_of(layout, folder, run="load", step=3)

    assert checkpoint_differences(step_3(folder, layout.precision), again) == []


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_losses_norms_and_rates_go_on_as_on_one_process(
    straight: dict[str, Recorder], continued: dict[Layout, Recorder], layout: Layout
) -> None:
    assert_same_course(continued[layout], straight[layout.precision], layout=layout)


@pytest.mark.parametrize("target", [Layout(1, 1, 0), Layout(2, 2, 3)], ids=lambda to: to.name)
def test_what_a_pipeline_wrote_others_load_bitwise(
    folder: Path, continued: dict[Layout, Recorder], target: Layout
) -> None:
    assert WIDE in continued
    written = step_of(WIDE, folder, run="go-on", step=6)
    config = config_on(target, folder, run="after", load=written, exit_step=6, layers=LAYERS)

    run_ranks(train_and_record, target.ranks, config)

    again = step_of(target, folder, run="after", step=6)
    assert checkpoint_differences(written, again) == []


@pytest.mark.parametrize(
    "layout",
    [Layout(4, 1, 1, "bf16", pp_size=2), Layout(4, 2, 1, pp_size=2, schedule="zb-v")],
    ids=lambda layout: layout.name,
)
def test_the_same_layout_goes_on_bitwise(
    folder: Path, straight: dict[str, Recorder], layout: Layout
) -> None:
    del straight
    start, source = step_3(folder, layout.precision), step_of(layout, folder, run="once", step=4)
    stop = config_on(layout, folder, run="once", load=start, exit_step=4, layers=LAYERS)
    second = config_on(layout, folder, run="twice", load=source, exit_step=6, layers=LAYERS)
    through = config_on(layout, folder, run="through", load=start, exit_step=6, layers=LAYERS)

    stopped, resumed, whole = run_ranks(train_each, layout.ranks, [stop, second, through])[0]

    assert stopped.losses + resumed.losses == whole.losses
    one, other = (step_of(layout, folder, run=run, step=6) for run in ("twice", "through"))
    assert checkpoint_differences(one, other) == []


def test_stages_validate_to_the_loss_of_one_process(folder: Path) -> None:
    def validating(name: str, **parallel: object) -> TrainConfig:
        return tiny_config(
            folder / "store",
            folder / name,
            model={"num_layers": LAYERS},
            data={"split": "80,20,0"},
            train={"train_steps": 2},
            schedule={"warmup_steps": 0},
            parallel=parallel,
            # 11 samples do not fill the micro batches.
            watch={"eval_interval": 1, "eval_samples": 11},
            checkpoint={"save_final": False},
        )

    one = run_ranks(train_and_record, 1, validating("alone"))[0]
    both = run_ranks(
        train_each,
        4,
        [
            validating("stages", pp_size=2, tp_size=2),
            validating("v", pp_size=2, schedule="zb-v"),
        ],
    )

    expected = [(report.step, report.loss, report.tokens) for report in one.validations]
    assert len(expected) == 2
    for every_run in both:
        for run in every_run:
            found = [(report.step, report.loss, report.tokens) for report in run.validations]
            assert found == [pytest.approx(each, rel=2e-6) for each in expected]
