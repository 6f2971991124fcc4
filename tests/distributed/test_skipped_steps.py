"""Gradients that are not finite on one rank: the step is skipped on all, and nothing changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from mds_kernels.testing import run_ranks
from mds_train.config import TrainConfig
from recorded_runs import Recorder, checkpoint_differences
from tiny_run import make_store, tiny_config

pytestmark = pytest.mark.timeout(420)

LAYOUTS = {
    f"tp{tp_size}z{stage}-{precision}": (tp_size, stage, precision)
    for tp_size, stage, precision in [
        (1, 0, "fp32"),
        (1, 1, "fp32"),
        (1, 2, "fp32"),
        (1, 3, "fp32"),
        (2, 0, "fp32"),
        (2, 1, "fp32"),
        (1, 0, "bf16"),
        (1, 1, "bf16"),
        (1, 3, "bf16"),
    ]
}


def config_of(name: str, folder: Path, **train: object) -> TrainConfig:
    tp_size, stage, precision = LAYOUTS[name]
    return tiny_config(
        folder / "store",
        folder / name,
        train={"precision": precision, "train_steps": 4} | train,
        parallel={"tp_size": tp_size, "zero_stage": stage},
        checkpoint={"save_interval": 1},
    )


def train_with_nan(configs: list[TrainConfig], first: int, last: int) -> list[Recorder | str]:
    """Train; on the last rank, the loss is NaN in these steps. Returns errors as text."""
    from mds_train import train
    from mds_train.engines.deepspeed import DeepSpeedEngine
    from mds_train.loop import TrainingDivergedError

    plain_backward = DeepSpeedEngine.backward
    results: list[Recorder | str] = []
    for config in configs:
        recorder = Recorder()

        def backward(self, loss, *, last: bool, seen=recorder) -> None:  # type: ignore[no-untyped-def]
            step = len(seen.steps) + 1
            poisoned = dist.get_rank() == dist.get_world_size() - 1 and first <= step <= last_step
            plain_backward(self, loss * float("nan") if poisoned else loss, last=last)

        last_step = last
        DeepSpeedEngine.backward = backward  # type: ignore[method-assign]
        try:
            train(config, watchers=[recorder])
        except TrainingDivergedError as error:
            results.append(str(error))
        else:
            results.append(recorder)
    return results


def test_nothing_changes_on_any_layout_and_the_run_goes_on(tmp_path: Path) -> None:
    make_store(tmp_path)
    configs = [config_of(name, tmp_path) for name in LAYOUTS]

    found = run_ranks(train_with_nan, 2, configs, 3, 3, timeout=400)

    for rank in found:
        for name, run in zip(LAYOUTS, rank, strict=True):
            assert isinstance(run, Recorder), name
            assert [step.skipped for step in run.steps] == [False, False, True, False], name
            assert [step.applied_updates for step in run.steps] == [1, 2, 2, 3]
            assert [step.consumed_samples for step in run.steps] == [8, 16, 24, 32]
            # The schedule does not move with a skipped step.
            assert run.steps[3].lr == run.steps[2].lr
            assert [event.event for event in run.events].count("skip") == 1
    for name in LAYOUTS:
        checkpoints = tmp_path / name / "checkpoints"
        before, after = checkpoints / "step-2", checkpoints / "step-3"
        assert checkpoint_differences(before, after) == [], name
        assert checkpoint_differences(after, checkpoints / "step-4") != [], name


def test_too_many_in_a_row_end_the_run_and_name_the_samples(tmp_path: Path) -> None:
    make_store(tmp_path)
    config = config_of("tp1z1-fp32", tmp_path, max_skipped_steps=2)

    found = run_ranks(train_with_nan, 2, [config], 2, 4)

    for (message,) in found:
        assert isinstance(message, str)
        assert "2 steps in a row up to step 3" in message
        assert "samples were 16 to 23" in message
