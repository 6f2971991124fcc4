"""The size of the global batch as a pure function of the samples that were consumed before it."""

from __future__ import annotations

from dataclasses import dataclass

from mds_train.config.training import LoopConfig

__all__ = ["BatchSizes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """Grows from `start` by `increment` to `final` over `ramp_samples`, as Megatron's ramp-up does.

    Attributes:
        final: train.global_batch_size.
        start: Size of the first batch; equal to `final` where nothing grows.
        increment: What is added each time.
        ramp_samples: Samples over which it grows, cut into equal parts.
    """

    final: int
    start: int
    increment: int = 1
    ramp_samples: int = 0

    @classmethod
    def from_config(cls, config: LoopConfig) -> BatchSizes:
        """The sizes that the [train] table describes."""
        final, ramp = config.global_batch_size, config.rampup_batch_size
        if not ramp:
            return cls(final=final, start=final)
        return cls(final=final, start=ramp[0], increment=ramp[1], ramp_samples=ramp[2])

    def at(self, consumed_samples: int) -> int:
        """Size of the batch that begins after so many samples."""
        increments = (self.final - self.start) // self.increment
        if not increments or consumed_samples > self.ramp_samples:
            return self.final
        # Whole numbers: the part that the sample falls into, of `increments` equal ones.
        done = consumed_samples * increments // max(self.ramp_samples, 1)
        return min(self.start + done * self.increment, self.final)

    def consumed_after(self, steps: int, *, since: int = 0) -> int:
        """Samples that are consumed after so many steps, where it were ``since`` before them."""
        consumed = since
        for step in range(steps):
            size = self.at(consumed)
            if size == self.final:
                return consumed + (steps - step) * size
            consumed += size
        return consumed

    def steps_for(self, samples: int) -> int:
        """Whole steps that so many samples are enough for."""
        consumed = steps = 0
        while (size := self.at(consumed)) != self.final and consumed + size <= samples:
            consumed, steps = consumed + size, steps + 1
        return steps + max(samples - consumed, 0) // size
