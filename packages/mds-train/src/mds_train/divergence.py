"""What a run says of a step whose gradients were not finite, and when it gives up."""

from __future__ import annotations

from mds_train.state import TrainState
from mds_train.step import StepOutcome

__all__ = ["SkippedStep", "TrainingDivergedError"]


class TrainingDivergedError(ValueError):
    """Too many steps in a row had gradients that were not finite."""


class SkippedStep:
    """A step that was not applied.

    Args:
        outcome: What it found.
        state: The counters after it.
        first: Its first sample.
    """

    def __init__(self, outcome: StepOutcome, state: TrainState, *, first: int) -> None:
        self._update = outcome.update
        self._state = state
        self._samples = f"{first} to {state.consumed_samples - 1}"
        self._why = "" if outcome.cause is None else f" {outcome.cause.sentence()}".rstrip()

    @property
    def message(self) -> str:
        """What to tell of it."""
        scale = self._update.loss_scale
        scaled = f", loss scale {scale:g}" if scale != 1.0 else ""
        return (
            f"Gradients were not finite: step skipped on all ranks (samples "
            f"{self._samples}{scaled}).{self._why}"
        )

    def reason_to_give_up(self, *, limit: int) -> str | None:
        """Why the run ends here; None if it goes on.

        Args:
            limit: So many skipped steps in a row are too many.
        """
        if self._update.exhausted:
            return (
                f"Step {self._state.iteration} had gradients that were not finite at the smallest "
                f"loss scale ({self._update.loss_scale:g}, fp16.min_scale; samples "
                f"{self._samples}); lower optimizer.lr, look at these samples, or train in "
                f"bf16.{self._why} The checkpoints are untouched."
            )
        in_a_row = self._state.skipped_in_a_row
        if self._update.searching or in_a_row < limit:
            return None
        return (
            f"{in_a_row} steps in a row up to step {self._state.iteration} had gradients that were "
            f"not finite (the last samples were {self._samples}); lower optimizer.lr, look at "
            f"these samples, or raise train.max_skipped_steps.{self._why} The checkpoints are "
            f"untouched."
        )
