"""Gradients that are not finite on one rank: the step is skipped on all, and nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from recorded_runs import Recorder, checkpoint_differences
from tiny_run import make_store, tiny_config
from torch import Tensor

from mds_core.pipeline import Pipeline
from mds_kernels.testing import run_ranks
from mds_train.config import TrainConfig

pytestmark = pytest.mark.timeout(420)

OFFLOADING = {
    f"z{stage}-{precision}-on-host": (1, 1, stage, precision)
    for stage, precision in [(1, "bf16"), (2, "fp32"), (2, "bf16"), (3, "bf16")]
}
LAYOUTS = OFFLOADING | {
    f"tp{tp_size}pp{pp_size}z{stage}-{precision}": (tp_size, pp_size, stage, precision)
    for tp_size, pp_size, stage, precision in [
        (1, 1, 0, "fp32"),
        (1, 1, 1, "fp32"),
        (1, 1, 2, "fp32"),
        (1, 1, 3, "fp32"),
        (2, 1, 0, "fp32"),
        (2, 1, 1, "fp32"),
        (1, 2, 0, "fp32"),
        (1, 2, 1, "fp32"),
        (1, 1, 0, "bf16"),
        (1, 1, 1, "bf16"),
        (1, 1, 3, "bf16"),
        (1, 2, 0, "bf16"),
        (1, 2, 1, "bf16"),
    ]
}


def config_of(name: str, folder: Path, **train: object) -> TrainConfig:
    tp_size, pp_size, stage, precision = LAYOUTS[name]
    return tiny_config(
        folder / "store",
        folder / name,
        train={"precision": precision, "train_steps": 4} | train,
        parallel={"tp_size": tp_size, "pp_size": pp_size, "zero_stage": stage},
        memory={"offload_optimizer": "cpu"} if name in OFFLOADING else {},
        checkpoint={"save_interval": 1},
    )


def train_with_nan(
    configs: list[TrainConfig], never_ending: TrainConfig
) -> tuple[list[Recorder | str], Recorder | str]:
    """Train with step 3 spoilt, and once with all steps from 2 on; errors come as text."""
    once = [train_one_with_nan(config, range(3, 4)) for config in configs]
    return once, train_one_with_nan(never_ending, range(2, 9))


def train_one_with_nan(config: TrainConfig, poisoned: range) -> Recorder | str:
    """The loss of these steps is NaN on the last rank."""
    from mds_train import train
    from mds_train.engines.deepspeed import DeepSpeedEngine
    from mds_train.loop import TrainingDivergedError

    recorder = Recorder()
    plain_backward, plain_step = DeepSpeedEngine.backward, Pipeline.step
    is_last_rank = dist.get_rank() == dist.get_world_size() - 1

    def hurt() -> bool:
        return is_last_rank and len(recorder.steps) + 1 in poisoned

    def backward(self: DeepSpeedEngine, loss: Tensor, *, last: bool) -> None:
        plain_backward(self, loss * float("nan") if hurt() else loss, last=last)

    def step(self: Pipeline, *args: Any, **kwargs: Any) -> Any:
        loss = plain_step(self, *args, **kwargs)
        if hurt():  # only now, else the tied embedding would carry it to the first stage
            self.canonical_parameters()["decoder.final_layernorm.weight"].grad.fill_(float("nan"))
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepSpeedEngine, "backward", backward)
        patch.setattr(Pipeline, "step", step)
        try:
            train(config, watchers=[recorder])
        except TrainingDivergedError as error:
            return str(error)
    return recorder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("skipped")
    make_store(path)
    return path


@pytest.fixture(scope="module")
def found(folder: Path) -> list[tuple[list[Recorder | str], Recorder | str]]:
    """Of both ranks."""
    configs = [config_of(name, folder) for name in LAYOUTS]
    never_ending = config_of(
        "tp1pp1z1-fp32", folder, run_dir=str(folder / "never"), max_skipped_steps=2
    )
    return run_ranks(train_with_nan, 2, configs, never_ending, timeout=400)


@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_changes_and_the_run_goes_on(
    folder: Path, found: list[tuple[list[Recorder | str], Recorder | str]], name: str
) -> None:
    for once, _ in found:
        run = once[list(LAYOUTS).index(name)]
        assert isinstance(run, Recorder)
        assert [step.skipped for step in run.steps] == [False, False, True, False]
        assert [step.applied_updates for step in run.steps] == [1, 2, 2, 3]
        assert [step.consumed_samples for step in run.steps] == [8, 16, 24, 32]
        # The schedule does not move with a skipped step.
        assert run.steps[3].lr == run.steps[2].lr
        (skip,) = [event for event in run.events if event.event == "skip"]
        named = {each["name"] for each in skip.details["gradients"]}
        assert named == {"decoder.final_layernorm.weight"} if "pp2" in name else len(named) > 3
        assert "Not finite: " in skip.message
        assert sorted(named)[0] in skip.message or len(named) > 3
    checkpoints = folder / name / "checkpoints"
    before, after = checkpoints / "step-2", checkpoints / "step-3"
    assert checkpoint_differences(before, after) == []
    assert checkpoint_differences(after, checkpoints / "step-4") != []


def test_too_many_in_a_row_end_the_run_and_name_the_samples(
    found: list[tuple[list[Recorder | str], Recorder | str]],
) -> None:
    for _, message in found:
        assert isinstance(message, str)
        assert "2 steps in a row up to step 3" in message
        assert "samples were 16 to 23" in message
        assert "Not finite: embedding.word_embeddings.weight on rank 0 (" in message
