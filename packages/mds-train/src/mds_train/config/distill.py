"""The [distill] table: a teacher that a GPT learns from besides the text."""

from __future__ import annotations

from dataclasses import dataclass

from mds_core.config.distillation import Distillation
from mds_train.config.checks import require_positive

__all__ = ["DistillConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig:
    """Knowledge distillation: alpha * cross-entropy + beta * T^2 * KL(teacher || student)."""

    teacher: str | None = None
    """A model of the same vocabulary to learn from: a checkpoint of any format, or a run."""

    alpha: float = 1.0
    """Weight of the cross-entropy with the text."""

    beta: float = 1.0
    """Weight of the divergence from the teacher."""

    temperature: float = 1.0
    """T: divides the logits of both before they are compared."""

    until_step: int | None = None
    """Learn from the text alone after this step (staged distillation)."""

    def __post_init__(self) -> None:
        require_positive("distill.until_step", self.until_step)
        try:
            self.loss  # noqa: B018 - checks itself
        except ValueError as error:
            raise ValueError(f"[distill]: {error}") from error

    @property
    def loss(self) -> Distillation:
        """The parts of the loss."""
        return Distillation(alpha=self.alpha, beta=self.beta, temperature=self.temperature)
