"""How far a run is: counters that checkpoints keep; a new object after every step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

__all__ = ["TrainState"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """Counters of a run. The schedule follows `applied_updates`, the data `consumed_samples`."""

    iteration: int = 0
    """Steps done, skipped ones included."""

    consumed_samples: int = 0
    consumed_tokens: int = 0
    applied_updates: int = 0
    """Steps that changed the weights."""

    skipped_steps: int = 0
    """Steps whose gradients were not finite."""

    skipped_in_a_row: int = 0
    """How many of them were the last ones."""

    def after_step(self, *, samples: int, tokens: int, applied: bool) -> TrainState:
        """The counters one step later."""
        return replace(
            self,
            iteration=self.iteration + 1,
            consumed_samples=self.consumed_samples + samples,
            consumed_tokens=self.consumed_tokens + tokens,
            applied_updates=self.applied_updates + int(applied),
            skipped_steps=self.skipped_steps + int(not applied),
            skipped_in_a_row=0 if applied else self.skipped_in_a_row + 1,
        )

    def counters(self) -> dict[str, int]:
        """What a checkpoint's manifest holds."""
        return asdict(self)

    @classmethod
    def from_counters(cls, counters: dict[str, int]) -> TrainState:
        """The state that a manifest describes; unknown counters are left aside."""
        known = {name: value for name, value in counters.items() if name in cls.__slots__}
        return cls(**known)
