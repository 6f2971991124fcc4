"""Curriculum schedules give DeepSpeed's difficulty at every step."""

from __future__ import annotations

from typing import Any

import pytest

from mds_data.sampling.pacing import pacing_from_deepspeed

pytest.importorskip("deepspeed", reason="it has the schedules of the original")


@pytest.mark.parametrize(
    "schedule",
    [
        {
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 90, "difficulty_step": 8},
        },
        {
            "schedule_type": "fixed_root",
            "schedule_config": {
                "total_curriculum_step": 77,
                "difficulty_step": 8,
                "root_degree": 2,
            },
        },
        {
            "schedule_type": "fixed_discrete",
            "schedule_config": {"difficulty": [8, 24, 72], "max_step": [5, 50]},
        },
    ],
    ids=lambda schedule: schedule["schedule_type"],
)
def test_every_step_has_deepspeeds_difficulty(schedule: dict[str, Any]) -> None:
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

    config = {"min_difficulty": 8, "max_difficulty": 72, **schedule}
    theirs = CurriculumScheduler(config)

    ours = pacing_from_deepspeed(config)

    for step in range(1, 200):
        assert ours.at(step) == theirs.get_difficulty(step)
