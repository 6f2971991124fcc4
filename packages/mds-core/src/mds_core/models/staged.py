"""What all models say of being a stage of a pipeline: when they must be one, and what it lacks."""

from __future__ import annotations

from mds_core.groups import ProcessGroups
from mds_core.partition import Stage

__all__ = ["check_divided", "headless"]


def check_divided(stage: Stage | None, groups: ProcessGroups, *, kind: str) -> None:
    """Raise ValueError if a layout with pipeline stages is given a whole model."""
    if stage is None and groups.pp_size > 1:
        raise ValueError(
            f"the layout has {groups.pp_size} pipeline stages and {kind} would build the whole "
            f"model on each; build mds_core.pipeline.Pipeline, or set pp_size=1."
        )


def headless(stage: Stage) -> ValueError:
    """The error of asking a stage that is not the last for what only the last has."""
    return ValueError(
        f"stage {stage.index} of {stage.count} has no head; only the last stage gives logits or a "
        f"loss."
    )
