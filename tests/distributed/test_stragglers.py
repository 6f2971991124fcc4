"""The rank whose own work takes longest is named, by all ranks alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from recorded_runs import Recorder
from tiny_run import make_store, tiny_config

from mds_kernels.testing import run_ranks
from mds_train.config import TrainConfig

pytestmark = pytest.mark.timeout(240)


def train_with_a_slow_clock(config: TrainConfig) -> Recorder:
    """Rank 1 finds that its reading took a thousand seconds more each time."""
    from mds_train import train
    from mds_train.watch.timing import PhaseTimer

    recorder = Recorder()
    plain = PhaseTimer.taken

    def taken(self: PhaseTimer) -> dict[str, float]:
        seconds = plain(self)
        if dist.get_rank() == 1:
            seconds["reading of data"] += 1000.0
        return seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PhaseTimer, "taken", taken)
        train(config, watchers=[recorder])
    return recorder


def test_the_slowest_rank_is_named(tmp_path: Path) -> None:
    make_store(tmp_path)
    watch: dict[str, Any] = {"straggler_interval": 3}
    config = tiny_config(tmp_path / "store", tmp_path / "run", watch=watch)

    found = run_ranks(train_with_a_slow_clock, 2, config)

    for recorder in found:
        events = [event for event in recorder.events if event.event == "stragglers"]
        assert [event.step for event in events] == [3, 6]
        for event in events:
            assert "Slowest of 2 ranks over 3 steps: rank 1" in event.message
            assert [row["rank"] for row in event.details["ranks"]] == [1, 0]
            assert event.details["ranks"][0]["ratio"] > 1.9
