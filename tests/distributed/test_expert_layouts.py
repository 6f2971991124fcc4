"""Experts that ranks share out: a run goes on from one process's and back, losses as on one."""

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
from recorded_runs import Recorder, checkpoint_differences, train_and_record
from tiny_run import make_store

from mds_kernels.testing import run_ranks

pytestmark = pytest.mark.timeout(900)

MODEL = {
    "num_experts": 4,
    "moe_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_shared_hidden_size": 16,
    "moe_z_loss_coeff": 1e-3,
}
LAYERS = 2
SPREAD = Layout(4, 1, 2, ep_size=2)
LAYOUTS = always(
    [
        SPREAD,
        Layout(4, 2, 2, ep_size=2, expert_tensor_parallel=False),
        Layout(4, 1, 1, pp_size=2, ep_size=2),
    ],
    [
        Layout(4, 2, 1, "bf16", ep_size=2),
        Layout(2, 1, 0, ep_size=2),
        Layout(2, 1, 1, ep_size=2),
        Layout(2, 1, 0, "bf16", ep_size=2),
        Layout(2, 1, 1, "bf16", ep_size=2),
        Layout(2, 1, 2, "bf16", ep_size=2),
        Layout(2, 1, 3),
        Layout(4, 1, 0, ep_size=4),
        Layout(4, 1, 2, ep_size=2, offload_optimizer="cpu"),
        Layout(4, 1, 1, "bf16", ep_size=2, offload_optimizer="cpu"),
        Layout(4, 1, 1, ep_size=2),
        Layout(4, 2, 0, ep_size=2, sequence_parallel=True),
        Layout(4, 1, 1, ulysses_size=2, ep_size=2),
        Layout(4, 1, 0, "bf16", pp_size=2, ep_size=2),
        Layout(4, 1, 1, "bf16", pp_size=2, ep_size=2, schedule="zb-h1"),
    ],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    make_store(path)
    return path


@pytest.fixture(scope="module")
def straight(folder: Path) -> dict[str, Recorder]:
    return straight_runs(folder, layers=LAYERS, **MODEL)


@pytest.fixture(scope="module")
def continued(folder: Path, straight: dict[str, Recorder]) -> dict[Layout, Recorder]:
    del straight  # has written the checkpoints
    return continue_on(LAYOUTS, folder, layers=LAYERS, **MODEL)


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


def test_what_ranks_with_experts_wrote_one_process_loads_bitwise(
    folder: Path, continued: dict[Layout, Recorder]
) -> None:
    assert SPREAD in continued
    written = step_of(SPREAD, folder, run="go-on", step=6)
    one = Layout(1, 1, 0)
    config = config_on(
        one, folder, run="gathered", load=written, exit_step=6, layers=LAYERS, **MODEL
    )

    run_ranks(train_and_record, 1, config)

    assert checkpoint_differences(written, step_of(one, folder, run="gathered", step=6)) == []
