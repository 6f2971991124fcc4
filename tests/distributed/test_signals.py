"""One process that gets a signal brings all of them to a common save."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
from recorded_runs import Recorder
from tiny_run import make_store, tiny_config

from mds_ckpt import open_checkpoint
from mds_kernels.testing import run_ranks
from mds_train.config import TrainConfig
from mds_train.events import StepReport

pytestmark = pytest.mark.timeout(240)


class Signaller(Recorder):
    """Sends this process a signal, twice, after step 2."""

    number = signal.SIGTERM

    def on_step(self, report: StepReport) -> None:
        super().on_step(report)
        if report.step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), self.number)
            os.kill(os.getpid(), self.number)


def interrupted_and_whole(
    config: TrainConfig, other: TrainConfig
) -> tuple[str, int, list[float], list[float]]:
    """Reason and step of the interruption, losses of both halves, losses of a run left alone."""
    from mds_train import train

    first, second, whole = Signaller(), Recorder(), Recorder()
    result = train(config, watchers=[first])
    train(config, resume=True, watchers=[second])
    train(other, watchers=[whole])
    return result.reason, result.step, first.losses + second.losses, whole.losses


def test_all_ranks_save_at_the_same_step_and_the_run_resumes_exactly(tmp_path: Path) -> None:
    make_store(tmp_path)
    config = tiny_config(tmp_path / "store", tmp_path / "run")
    other = tiny_config(tmp_path / "store", tmp_path / "whole")

    found = run_ranks(interrupted_and_whole, 2, config, other)

    for reason, step, losses, whole in found:
        assert (reason, step) == ("SIGTERM", 2)
        assert losses == whole
    assert open_checkpoint(tmp_path / "run" / "checkpoints" / "step-2").step == 2
