"""What of a student's loss is the text's, and what the teacher's."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Distillation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Distillation:
    """What of the loss is the teacher's."""

    alpha: float = 1.0
    """Weight of the cross-entropy with the text."""
    beta: float = 1.0
    """Weight of the divergence from the teacher."""
    temperature: float = 1.0
    """Divides the logits of both before they are compared; the result is multiplied by its square,
    so that gradients keep their size."""

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; a weight is at least 0.")
        if self.temperature <= 0:
            raise ValueError(f"the temperature is {self.temperature}; take one above 0.")
