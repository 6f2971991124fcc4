"""Run the stages of one model on successive ranks, micro batch by micro batch."""

from mds_core.pipeline.runner import Pipeline, PipelineLoss
from mds_core.pipeline.schedule import SCHEDULES, Schedule

__all__ = ["SCHEDULES", "Pipeline", "PipelineLoss", "Schedule"]
