"""A run goes on on any layout without a conversion: state bitwise, losses as on one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from recorded_runs import Recorder, checkpoint_differences, train_and_record, train_each
from tiny_run import make_store, tiny_config

from mds_kernels.testing import TOLERANCES, run_ranks
from mds_train.config import TrainConfig

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Layout:
    ranks: int
    tp_size: int
    zero_stage: int
    precision: str = "fp32"
    ulysses_size: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    recompute_layers: int = 1

    @property
    def name(self) -> str:
        dp_size = self.ranks // (self.tp_size * self.ulysses_size)
        parts = [
            f"tp{self.tp_size}dp{dp_size}z{self.zero_stage}",
            f"ulysses{self.ulysses_size}" * (self.ulysses_size > 1),
            "sp" * self.sequence_parallel,
            f"{self.recompute}{self.recompute_layers}" * (self.recompute != "none"),
            self.precision,
        ]
        return "-".join(part for part in parts if part)

    @property
    def parallel(self) -> dict[str, object]:
        keys = ("tp_size", "zero_stage", "ulysses_size", "sequence_parallel")
        return {key: getattr(self, key) for key in keys}

    @property
    def memory(self) -> dict[str, object]:
        return {key: getattr(self, key) for key in ("recompute", "recompute_layers")}


LAYOUTS = [
    Layout(1, 1, 0),
    Layout(1, 1, 1, recompute="full", recompute_layers=2),
    Layout(1, 1, 3, recompute="full"),
    Layout(2, 2, 1),
    Layout(2, 1, 1),
    Layout(2, 1, 3),
    Layout(2, 2, 0, "bf16"),
    Layout(2, 1, 2, "bf16"),
    Layout(2, 1, 3, "bf16"),
    Layout(2, 2, 1, sequence_parallel=True),
    Layout(2, 2, 2, sequence_parallel=True, recompute="selective"),
    Layout(2, 1, 0, ulysses_size=2),
    Layout(2, 1, 3, ulysses_size=2, recompute="full"),
    Layout(2, 1, 1, "bf16", ulysses_size=2),
    Layout(4, 2, 0),
    Layout(4, 2, 1),
    Layout(4, 2, 2),
    Layout(4, 2, 3),
    Layout(4, 1, 1, ulysses_size=2),
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
        parallel=layout.parallel,
        memory=layout.memory,
        checkpoint={"load": str(load)},
    )


def step_3(folder: Path, precision: str) -> Path:
    return folder / f"straight-{precision}" / "checkpoints" / "step-3"


def step_of(layout: Layout, folder: Path, *, run: str, step: int) -> Path:
    return folder / f"{run}-{layout.name}" / "checkpoints" / f"step-{step}"


@pytest.fixture(scope="module")
def continued(folder: Path, straight: dict[str, Recorder]) -> dict[Layout, Recorder]:
    """On each layout: step 3 loaded and saved again ("load"), and trained up to 6 ("go-on")."""
    found: dict[Layout, Recorder] = {}
    for ranks in sorted({layout.ranks for layout in LAYOUTS}):
        layouts = [layout for layout in LAYOUTS if layout.ranks == ranks]
        configs = [
            config_on(layout, folder, run=run, load=step_3(folder, layout.precision), exit_step=to)
            for layout in layouts
            for run, to in (("load", 3), ("go-on", 6))
        ]
        recorders = run_ranks(train_each, ranks, configs, timeout=400)[0]
        found |= dict(zip(layouts, recorders[1::2], strict=True))
    return found


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
    exact = layout.precision == "fp32"
    expected, found = straight[layout.precision].steps[3:], continued[layout].steps

    tolerance = TOLERANCES["layout_loss_float32" if exact else "layout_loss_bfloat16"]
    assert [s.loss for s in found] == pytest.approx([s.loss for s in expected], rel=tolerance)
    norms = [s.grad_norm for s in expected]
    assert [s.grad_norm for s in found] == pytest.approx(norms, rel=1e-5 if exact else 2e-2)
    assert [s.lr for s in found] == [s.lr for s in expected]


def test_what_four_ranks_wrote_one_process_loads_bitwise(
    folder: Path, continued: dict[Layout, Recorder]
) -> None:
    spread = Layout(4, 2, 3)
    assert spread in continued
    written = step_of(spread, folder, run="go-on", step=6)
    one = config_on(Layout(1, 1, 0), folder, run="gathered", load=written, exit_step=6)

    run_ranks(train_and_record, 1, one)

    gathered = step_of(Layout(1, 1, 0), folder, run="gathered", step=6)
    assert checkpoint_differences(written, gathered) == []
