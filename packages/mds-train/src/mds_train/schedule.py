"""Learning rate and weight decay as pure functions of applied updates, or of consumed samples.

``learning_rate(k)`` is the rate in force after ``k`` updates: update number ``k + 1`` uses it. So
with a warm-up from 0 the first update moves nothing, as in Megatron. A skipped step applies no
update and moves nothing here. With ``by_samples`` all lengths and places are counted in samples, as
in Megatron: then a small batch moves it less than a large one, and a skipped step as any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mds_train.config import TrainConfig
from mds_train.config.batch_growth import BatchSizes
from mds_train.state import TrainState

__all__ = ["Schedule"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """One run's course of learning rate and weight decay."""

    kind: str
    max_lr: float
    min_lr: float
    warmup_steps: int
    warmup_init: float
    decay_steps: int
    wsd_decay_steps: int | None
    wsd_decay_style: str
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_style: str
    by_samples: bool = False

    @classmethod
    def from_config(cls, config: TrainConfig) -> Schedule:
        """The schedule that the [optimizer], [schedule] and [train] tables describe."""
        schedule, decay = config.schedule, config.optimizer.weight_decay
        end = decay if schedule.end_weight_decay is None else schedule.end_weight_decay
        last, falling = schedule.decay_steps or config.train.train_steps, schedule.wsd_decay_steps

        def length(steps: int) -> int:
            if not schedule.by_samples:
                return steps
            return BatchSizes.from_config(config.train).consumed_after(steps)

        return cls(
            kind=schedule.kind,
            max_lr=config.optimizer.lr,
            min_lr=schedule.min_lr,
            warmup_steps=length(schedule.warmup_steps),
            warmup_init=schedule.warmup_init,
            decay_steps=length(last),
            wsd_decay_steps=falling and length(last) - length(last - falling),
            wsd_decay_style=schedule.wsd_decay_style,
            start_weight_decay=decay,
            end_weight_decay=end,
            weight_decay_style=schedule.weight_decay_style,
            by_samples=schedule.by_samples,
        )

    def place(self, state: TrainState) -> int:
        """Where a run stands on it."""
        return state.consumed_samples if self.by_samples else state.applied_updates

    def learning_rate(self, updates: int) -> float:
        """Rate after this many applied updates."""
        if updates < self.warmup_steps:
            share = updates / self.warmup_steps
            return self.warmup_init + (self.max_lr - self.warmup_init) * share
        return _KINDS[self.kind](self, updates)

    def weight_decay(self, updates: int) -> float:
        """Decoupled weight decay after this many applied updates."""
        share = min(updates / self.decay_steps, 1.0)
        form = (
            share if self.weight_decay_style == "linear" else 0.5 * (1 - math.cos(math.pi * share))
        )
        return self.start_weight_decay + (self.end_weight_decay - self.start_weight_decay) * form

    def differences(self, saved: dict[str, Any]) -> list[str]:
        """What differs from a saved schedule, as "field saved -> now", for messages."""
        return [
            f"{name} {saved[name]} -> {getattr(self, name)}"
            for name in self.__slots__
            if name in saved and saved[name] != getattr(self, name)
        ]


def _constant(schedule: Schedule, updates: int) -> float:
    del updates
    return schedule.max_lr


def _linear(schedule: Schedule, updates: int) -> float:
    return _between(schedule, 1 - _decayed(schedule, updates))


def _cosine(schedule: Schedule, updates: int) -> float:
    return _between(schedule, 0.5 * (math.cos(math.pi * _decayed(schedule, updates)) + 1))


def _inverse_square_root(schedule: Schedule, updates: int) -> float:
    knee = max(schedule.warmup_steps, 1)
    rate = schedule.max_lr * math.sqrt(knee) / math.sqrt(max(updates, knee))
    return max(schedule.min_lr, rate)


def _warmup_stable_decay(schedule: Schedule, updates: int) -> float:
    falling = schedule.wsd_decay_steps or 1
    into_decay = updates - (schedule.decay_steps - falling)
    share = min(max(into_decay / falling, 0.0), 1.0)
    return _between(schedule, _FALLS[schedule.wsd_decay_style](share))


def _decayed(schedule: Schedule, updates: int) -> float:
    """Share of the decay that is done: 0 at the end of the warm-up, 1 from decay_steps on."""
    length = max(schedule.decay_steps - schedule.warmup_steps, 1)
    return min((updates - schedule.warmup_steps) / length, 1.0)


def _between(schedule: Schedule, height: float) -> float:
    return schedule.min_lr + height * (schedule.max_lr - schedule.min_lr)


_KINDS: dict[str, Callable[[Schedule, int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "inverse-square-root": _inverse_square_root,
    "wsd": _warmup_stable_decay,
}
# Heights of the last part of "wsd": 1 where it begins, 0 where it ends.
_FALLS: dict[str, Callable[[float], float]] = {
    "linear": lambda share: 1 - share,
    "cosine": lambda share: 0.5 * (math.cos(math.pi * share) + 1),
    "exponential": lambda share: 2 * 0.5**share - 1,
    "minus-sqrt": lambda share: 1 - math.sqrt(share),
}
