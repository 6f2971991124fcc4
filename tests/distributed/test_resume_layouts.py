"""A run goes on on any layout without a conversion: state bitwise, losses as on one process."""

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

pytestmark = pytest.mark.timeout(600)


LAYERS = 2
LAYOUTS = always(
    [
        Layout(2, 1, 3),
        Layout(2, 2, 0, "bf16"),
        Layout(2, 2, 2, sequence_parallel=True, recompute="selective"),
        Layout(2, 1, 3, ulysses_size=2, recompute="full"),
        Layout(4, 2, 3),
        Layout(2, 1, 2, offload_optimizer="cpu"),
        Layout(2, 1, 1, ulysses_size=2, sequence_sharing="ring", sequence_chunk=3),
    ],
    [
        Layout(1, 1, 0),
        Layout(1, 1, 1, recompute="full", recompute_layers=2),
        Layout(1, 1, 3, recompute="full"),
        Layout(1, 1, 3, offload_activations=True),
        Layout(1, 1, 1, offload_optimizer="cpu"),
        Layout(2, 1, 1, "bf16", offload_optimizer="cpu"),
        Layout(2, 2, 2, "bf16", offload_optimizer="cpu"),
        Layout(2, 1, 3, offload_optimizer="cpu", offload_parameters="cpu"),
        Layout(2, 1, 3, "bf16", offload_optimizer="cpu", offload_parameters="cpu"),
        Layout(1, 1, 1, recompute="modules", recompute_modules=("norm", "mlp")),
        Layout(2, 2, 1),
        Layout(2, 1, 1),
        Layout(2, 1, 2, "bf16"),
        Layout(2, 1, 3, "bf16"),
        Layout(2, 2, 1, sequence_parallel=True),
        Layout(2, 1, 0, ulysses_size=2),
        Layout(2, 1, 1, "bf16", ulysses_size=2),
        Layout(4, 2, 0),
        Layout(4, 2, 2),
        Layout(4, 2, 1),
        Layout(4, 4, 1),
        Layout(4, 1, 1, ulysses_size=2),
        Layout(4, 1, 1, ulysses_size=4, sequence_sharing="ring", recompute="full"),
        Layout(4, 2, 0, ulysses_size=2, sequence_sharing="ring", sequence_parallel=True),
        Layout(1, 1, 1, sequence_chunk=5, recompute="full", offload_activations=True),
    ],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a store and, for each precision, a run of one process with checkpoints 3 and 6."""
    path = tmp_path_factory.mktemp("layouts")
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


def test_what_four_ranks_wrote_one_process_loads_bitwise(
    folder: Path, continued: dict[Layout, Recorder]
) -> None:
    spread = Layout(4, 2, 3)
    assert spread in continued
    written = step_of(spread, folder, run="go-on", step=6)
    one = config_on(
        Layout(1, 1, 0), folder, run="gathered", load=written, exit_step=6, layers=LAYERS
    )

    run_ranks(train_and_record, 1, one)

    gathered = step_of(Layout(1, 1, 0), folder, run="gathered", step=6)
    assert checkpoint_differences(written, gathered) == []
