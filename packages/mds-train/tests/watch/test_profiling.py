from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from mds_train.config import WatchConfig
from mds_train.watch.peak import measured_peak
from mds_train.watch.profiling import Profiling

CPU = torch.device("cpu")


def run_steps(config: WatchConfig, folder: Path, *, rank: int = 0, until: int = 5) -> None:
    profiling = Profiling(config, folder=folder, rank=rank, device=CPU)
    for step in range(1, until):
        with profiling.around(step), torch.profiler.record_function(f"step {step}"):
            torch.ones(8, 8) @ torch.ones(8, 8)
    profiling.close()


def test_the_chosen_steps_are_profiled(tmp_path: Path) -> None:
    run_steps(WatchConfig(profile_steps=(2, 3)), tmp_path)

    trace = json.loads((tmp_path / "rank-0-steps-2-3.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"step 2", "step 3", "aten::matmul"} <= names
    assert not {"step 1", "step 4"} & names
    assert "aten::mm" in (tmp_path / "rank-0-steps-2-3.txt").read_text()


def test_other_ranks_are_not_and_a_run_that_ends_early_keeps_what_it_has(tmp_path: Path) -> None:
    run_steps(WatchConfig(profile_steps=(2, 3)), tmp_path / "other", rank=1)
    run_steps(WatchConfig(profile_steps=(2, 9)), tmp_path / "early")

    assert not (tmp_path / "other").exists()
    assert (tmp_path / "early" / "rank-0-steps-2-9.json").is_file()


def test_a_memory_snapshot_needs_cuda_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        run_steps(WatchConfig(memory_snapshot_step=2), tmp_path)

    assert "memory_snapshot_step does nothing on cpu" in caplog.text


@pytest.mark.parametrize("steps", [(3,), (3, 2), (0, 2)])
def test_steps_that_cannot_be_are_refused(steps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="first and the last step"):
        WatchConfig(profile_steps=steps)


def test_unknown_trackers_are_refused() -> None:
    with pytest.raises(ValueError, match="must be one of wandb, mlflow, trackio"):
        WatchConfig(trackers=("wandb", "comet"))


def test_a_measured_peak_is_a_rate() -> None:
    assert 1e-4 < measured_peak(CPU, dtype=torch.float32, seconds=0.0) < 1e4
