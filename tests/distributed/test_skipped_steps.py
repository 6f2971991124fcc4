"""Gradients that are not finite on one rank: the step is skipped on all, and nothing changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from recorded_runs import Recorder, checkpoint_differences
from tiny_run import make_store, tiny_config
from torch import Tensor

from mds_kernels.testing import run_ranks
from mds_train.config import TrainConfig

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


def train_with_nan(configs: list[TrainConfig], poisoned: range) -> list[Recorder | str]:
    """Train; on the last rank, the loss of these steps is NaN. Returns errors as text."""
    return [train_one_with_nan(config, poisoned) for config in configs]


def train_one_with_nan(config: TrainConfig, poisoned: range) -> Recorder | str:
    from mds_train import train
    from mds_train.engines.deepspeed import DeepSpeedEngine
    from mds_train.loop import TrainingDivergedError

    recorder = Recorder()
    plain_backward = DeepSpeedEngine.backward
    is_last_rank = dist.get_rank() == dist.get_world_size() - 1

    def backward(self: DeepSpeedEngine, loss: Tensor, *, last: bool) -> None:
        hurt = is_last_rank and len(recorder.steps) + 1 in poisoned
        plain_backward(self, loss * float("nan") if hurt else loss, last=last)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepSpeedEngine, "backward", backward)
        try:
            train(config, watchers=[recorder])
        except TrainingDivergedError as error:
            return str(error)
    return recorder


def test_nothing_changes_on_any_layout_and_the_run_goes_on(tmp_path: Path) -> None:
    make_store(tmp_path)
    configs = [config_of(name, tmp_path) for name in LAYOUTS]

    found = run_ranks(train_with_nan, 2, configs, range(3, 4), timeout=400)

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

    found = run_ranks(train_with_nan, 2, [config], range(2, 5))

    for (message,) in found:
        assert isinstance(message, str)
        assert "2 steps in a row up to step 3" in message
        assert "samples were 16 to 23" in message
