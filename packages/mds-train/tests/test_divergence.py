"""What is said of skipped steps, and after how many of them a run gives up."""

from __future__ import annotations

from typing import Any

import pytest

from mds_train.divergence import SkippedStep
from mds_train.engines.interface import Update
from mds_train.state import TrainState
from mds_train.step import StepOutcome


def skipped(*, in_a_row: int = 1, **update: Any) -> SkippedStep:
    outcome = StepOutcome(
        loss=float("nan"),
        terms={},
        update=Update(grad_norm=float("inf"), applied=False, **update),
    )
    state = TrainState(iteration=7, consumed_samples=56, skipped_in_a_row=in_a_row)
    return SkippedStep(outcome, state, first=48)


def test_a_skipped_step_names_its_samples_and_the_loss_scale() -> None:
    start = "Gradients were not finite: step skipped on all ranks (samples 48 to 55"

    assert skipped().message == f"{start})."
    assert skipped(loss_scale=1024.0).message == f"{start}, loss scale 1024)."


@pytest.mark.parametrize(
    ("in_a_row", "update", "words"),
    [
        (2, {}, None),
        (3, {}, "3 steps in a row up to step 7"),
        (9, {"searching": True, "loss_scale": 8.0}, None),
        (1, {"exhausted": True, "loss_scale": 1.0}, "at the smallest loss scale (1,"),
    ],
)
def test_a_run_gives_up_after_too_many_or_at_the_smallest_scale(
    in_a_row: int, update: dict[str, Any], words: str | None
) -> None:
    reason = skipped(in_a_row=in_a_row, **update).reason_to_give_up(limit=3)

    assert reason is None if words is None else words in str(reason)
