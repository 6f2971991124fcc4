"""The [fp16] table: how the loss is scaled with train.precision "fp16"."""

from __future__ import annotations

from dataclasses import dataclass

from mds_train.config.checks import require_positive

__all__ = ["Fp16Config"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp16Config:
    """A scale that is looked for while training, or a fixed one."""

    loss_scale: float | None = None
    """A fixed scale; looked for when left out."""

    initial_scale: float = 65536.0
    """The scale of the first step."""

    window: int = 1000
    """So many steps without overflow double the scale."""

    hysteresis: int = 2
    """The scale is halved by this overflow in a row, the ones before are forgiven."""

    min_scale: float = 1.0
    """Where an overflow at this scale ends the run."""

    def __post_init__(self) -> None:
        for key in ("loss_scale", "initial_scale", "window", "hysteresis", "min_scale"):
            require_positive(f"fp16.{key}", getattr(self, key))
        if self.initial_scale < self.min_scale:
            raise ValueError(
                f"fp16.initial_scale {self.initial_scale} is below fp16.min_scale "
                f"{self.min_scale}; raise the first or lower the second."
            )
