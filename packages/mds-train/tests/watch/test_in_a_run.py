"""What the [watch] table asks for, in a run of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_cases import make_store, run_here, tiny_config

pytestmark = pytest.mark.timeout(120)


def test_steps_are_timed_by_part_and_profiled_when_asked(tmp_path: Path) -> None:
    make_store(tmp_path)
    watch = {"profile_steps": (2, 3), "straggler_interval": 2, "timers": True}

    recorder, _ = run_here(tiny_config(tmp_path, watch=watch))

    for step in recorder.steps:
        assert list(step.phases) == [
            "reading of data",
            "forward and backward",
            "update",
            "sum of the loss",
        ]
        assert sum(step.phases.values()) <= step.seconds
    assert (tmp_path / "run" / "profile" / "rank-0-steps-2-3.json").is_file()
    # One rank has nobody to be compared with.
    assert "stragglers" not in [event.event for event in recorder.events]
