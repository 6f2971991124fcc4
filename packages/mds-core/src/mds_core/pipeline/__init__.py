"""Run the stages of one model on successive ranks, micro batch by micro batch."""

from mds_core.pipeline.drawing import to_svg, to_text
from mds_core.pipeline.runner import Pipeline, PipelineLoss
from mds_core.pipeline.schedule import SCHEDULES, Schedule
from mds_core.pipeline.simulation import Simulation, Times, simulate
from mds_core.pipeline.timing import layer_seconds

__all__ = [
    "SCHEDULES",
    "Pipeline",
    "PipelineLoss",
    "Schedule",
    "Simulation",
    "Times",
    "layer_seconds",
    "simulate",
    "to_svg",
    "to_text",
]
