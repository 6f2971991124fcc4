"""A run goes on on any layout without a conversion: state bitwise, losses as on one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from recorded_runs import Recorder, checkpoint_differences, train_and_record, train_each
from tiny_run import make_store, tiny_config

from mds_kernels.testing import TOLERANCES, run_ranks
from mds_train.config import TrainConfig

pytestmark = pytest.mark.timeout(420)


@dataclass(frozen=True)
class Layout:
    ranks: int
    tp_size: int
    zero_stage: int
    precision: str = "fp32"

    @property
    def name(self) -> str:
        dp_size = self.ranks // self.tp_size
        return f"tp{self.tp_size}dp{dp_size}z{self.zero_stage}-{self.precision}"


LAYOUTS = [
    Layout(1, 1, 0),
    Layout(2, 2, 1),
    Layout(2, 1, 1),
    Layout(2, 1, 3),
    Layout(2, 2, 0, "bf16"),
    Layout(2, 1, 2, "bf16"),
    Layout(2, 1, 3, "bf16"),
    Layout(4, 2, 0),
    Layout(4, 2, 1),
    Layout(4, 2, 2),
    Layout(4, 2, 3),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a store and, for each precision, a run of one process with checkpoints 3 and 6."""
    path = tmp_path_factory.mktemp("layouts")
    make_store(path)
    return path


@pytest.fixture(scope="module")
def straight(folder: Path) -> dict[str, Recorder]:
    configs = [
        tiny_config(
            folder / "store",
            folder / f"straight-{precision}",
            train={"precision": precision},
            checkpoint={"save_interval": 3},
        )
        for precision in ("fp32", "bf16")
    ]
    fp32, bf16 = run_ranks(train_each, 1, configs)[0]
    return {"fp32": fp32, "bf16": bf16}


def config_on(layout: Layout, folder: Path, *, run: str, load: Path, exit_step: int) -> TrainConfig:
    """Go on from a checkpoint of another run, on this layout."""
    return tiny_config(
        folder / "store",
        folder / f"{run}-{layout.name}",
        train={"precision": layout.precision, "exit_step": exit_step},
        parallel={"tp_size": layout.tp_size, "zero_stage": layout.zero_stage},
        checkpoint={"load": str(load)},
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_state_is_bitwise_on_load_and_losses_go_on(
    folder: Path, straight: dict[str, Recorder], ranks: int
) -> None:
    layouts = [layout for layout in LAYOUTS if layout.ranks == ranks]
    saved = {layout: step_3(folder, layout.precision) for layout in layouts}
    only_load = [
        config_on(layout, folder, run="load", load=saved[layout], exit_step=3) for layout in layouts
    ]
    go_on = [
        config_on(layout, folder, run="go-on", load=saved[layout], exit_step=6)
        for layout in layouts
    ]

    found = run_ranks(train_each, ranks, [*only_load, *go_on], timeout=400)[0]

    for layout, loaded, run in zip(layouts, only_load, found[len(layouts) :], strict=True):
        written = Path(loaded.train.run_dir) / "checkpoints" / "step-3"
        assert checkpoint_differences(saved[layout], written) == [], layout.name
        tolerance = TOLERANCES[
            "layout_loss_float32" if layout.precision == "fp32" else "layout_loss_bfloat16"
        ]
        expected = straight[layout.precision].losses[3:]
        assert run.losses == pytest.approx(expected, rel=tolerance), layout.name
        lrs = [step.lr for step in straight[layout.precision].steps[3:]]
        assert [step.lr for step in run.steps] == lrs
        if layout.precision == "fp32":
            norms = [step.grad_norm for step in straight["fp32"].steps[3:]]
            assert [step.grad_norm for step in run.steps] == pytest.approx(norms, rel=1e-5)


def step_3(folder: Path, precision: str) -> Path:
    return folder / f"straight-{precision}" / "checkpoints" / "step-3"


def test_what_four_ranks_wrote_one_process_loads_bitwise(
    folder: Path, straight: dict[str, Recorder]
) -> None:
    spread = Layout(4, 2, 3)
    config = config_on(spread, folder, run="spread", load=step_3(folder, "fp32"), exit_step=6)
    run_ranks(train_and_record, 4, config)
    written = Path(config.train.run_dir) / "checkpoints" / "step-6"

    one = config_on(Layout(1, 1, 0), folder, run="gathered", load=written, exit_step=6)
    run_ranks(train_and_record, 1, one)

    gathered = Path(one.train.run_dir) / "checkpoints" / "step-6"
    assert checkpoint_differences(written, gathered) == []
