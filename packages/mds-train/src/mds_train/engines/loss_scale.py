"""The factor that keeps small fp16 gradients from vanishing. Plain numbers, no tensors.

The rule is DeepSpeed 0.19's: an overflow first uses up the hysteresis, then halves the scale; so
many good steps since the last overflow double it and refill the hysteresis. It is kept here, not in
DeepSpeed, since there it differs from one optimizer class to the next, and is not in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from mds_train.config.fp16 import Fp16Config

__all__ = ["LossScale"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """The scale of one step; a new object after every step."""

    scale: float
    good_steps: int = 0
    """Steps without overflow since the last one with."""

    forgiven: int = 1
    """The overflow that halves is this many away: 1 is the next one."""

    @classmethod
    def first(cls, config: Fp16Config) -> Self:
        """The scale that a run begins with."""
        if config.loss_scale is not None:
            return cls(scale=config.loss_scale)
        return cls(scale=config.initial_scale, forgiven=config.hysteresis)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """The scale that a checkpoint holds."""
        return cls(**{name: record[name] for name in cls.__slots__})

    def record(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return asdict(self)

    def at_floor(self, config: Fp16Config) -> bool:
        """Whether an overflow now cannot be answered by a smaller scale."""
        fixed = config.loss_scale is not None
        return fixed or (self.forgiven == 1 and self.scale <= config.min_scale)

    def after_step(self, *, overflow: bool, config: Fp16Config) -> LossScale:
        """The scale of the next step."""
        if config.loss_scale is not None:
            return self
        if overflow and self.forgiven > 1:
            return replace(self, good_steps=0, forgiven=self.forgiven - 1)
        if overflow:
            return replace(self, good_steps=0, scale=max(self.scale / 2, config.min_scale))
        grows = self.good_steps > 0 and self.good_steps % config.window == 0
        return LossScale(
            scale=self.scale * 2 if grows else self.scale,
            good_steps=self.good_steps + 1,
            forgiven=config.hysteresis if grows else self.forgiven,
        )
