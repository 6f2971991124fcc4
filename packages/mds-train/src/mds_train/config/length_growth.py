"""Curriculum by sequence length: short samples first, as a pure function of the step."""

from __future__ import annotations

from dataclasses import dataclass

from mds_train.config.batch_growth import BatchSizes
from mds_train.config.data import DataConfig

__all__ = ["SequenceLengths"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceLengths:
    """Grows from `start` to `final` over `steps`; each sample is cut to the length of its step.

    Attributes:
        final: data.seq_length.
        start: Length in the first step; equal to `final` where nothing grows.
        steps: Steps until the whole length is reached.
        multiple: Lengths are multiples of this.
        root: 1 grows linearly, 2 with the square root of the step, ...
    """

    final: int
    start: int
    steps: int = 1
    multiple: int = 1
    root: int = 1

    @classmethod
    def from_config(cls, config: DataConfig) -> SequenceLengths:
        """The lengths that the [data] table describes."""
        start = config.curriculum_start_length
        if start is None:
            return cls(final=config.seq_length, start=config.seq_length)
        return cls(
            final=config.seq_length,
            start=start,
            steps=config.curriculum_steps or 1,
            multiple=config.curriculum_multiple,
            root=config.curriculum_root,
        )

    def at(self, step: int) -> int:
        """Length of the samples of a step; 1 is the first one. DeepSpeed's rule."""
        share = min(step / self.steps, 1.0) ** (1.0 / self.root)
        length = int(self.start + share * (self.final - self.start))
        if length < self.final:
            length -= length % self.multiple
        return max(min(length, self.final), min(self.multiple, self.final))

    def tokens_of(self, steps: int, *, sizes: BatchSizes) -> int:
        """Tokens of the first so many steps."""
        consumed = tokens = 0
        for step in range(1, steps + 1):
            size, length = sizes.at(consumed), self.at(step)
            if size == sizes.final and length == self.final:
                return tokens + (steps - step + 1) * size * length
            consumed, tokens = consumed + size, tokens + size * length
        return tokens
