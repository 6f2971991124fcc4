"""What a vocabulary loss computes and which rows it may look at: all of it that is no tensor.

Letters: n tokens, v vocabulary, t tensor-parallel size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist

__all__ = ["Objective", "build_objective"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """A loss over a vocabulary of which this rank holds the rows from ``vocab_start`` on."""

    vocab_start: int
    """First global id of this rank's rows."""
    vocab_size: int
    """The true vocabulary; rows from there on are padding and take no part."""
    group: dist.ProcessGroup | None
    """The ranks over which the vocabulary is split."""
    label_smoothing: float
    z_loss: float
    ignore_index: int
    chunk_size: int | None
    """Tokens at a time; None lets the backend choose."""

    def __post_init__(self) -> None:
        """Refuse what can't be computed."""
        if self.vocab_start < 0 or self.vocab_size < 1:
            raise ValueError(
                f"vocab_start ({self.vocab_start}) must be >= 0 and vocab_size "
                f"({self.vocab_size}) >= 1; vocab_size is the vocabulary of the whole model."
            )
        if not 0 <= self.label_smoothing < 1 or self.z_loss < 0:
            raise ValueError(
                f"label_smoothing ({self.label_smoothing}) must be in [0, 1) and z_loss "
                f"({self.z_loss}) >= 0."
            )
        if self.chunk_size is not None and self.chunk_size < 1:
            raise ValueError(
                f"chunk_size ({self.chunk_size}) must be at least one token; leave it out for a "
                f"choice by the size of the vocabulary."
            )

    def true_rows(self, rows: int) -> int:
        """Return how many of this rank's ``rows`` are no padding; those are its first ones."""
        return max(0, min(rows, self.vocab_size - self.vocab_start))

    def chunks(self, num_tokens: int, *, default_size: int) -> Iterator[slice]:
        """Yield slices that cover the tokens."""
        size = self.chunk_size or default_size
        for start in range(0, num_tokens, size):
            yield slice(start, start + size)


def build_objective(
    *,
    rows: int,
    vocab_start: int,
    vocab_size: int | None,
    group: dist.ProcessGroup | None,
    label_smoothing: float,
    z_loss: float,
    ignore_index: int,
    chunk_size: int | None,
) -> Objective:
    """Complete what a caller gave: without ``vocab_size`` no row of any rank is padding."""
    if vocab_size is None:
        vocab_size = (
            vocab_start + rows if group is None else _unpadded_size(rows, vocab_start, group)
        )
    return Objective(
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        group=group,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        ignore_index=ignore_index,
        chunk_size=chunk_size,
    )


def _unpadded_size(rows: int, vocab_start: int, group: dist.ProcessGroup) -> int:
    if vocab_start != rows * group.rank():
        raise ValueError(
            f"vocab_start is {vocab_start} on rank {group.rank()} of the group, whose shard has "
            f"{rows} rows: equal shards would start at {rows * group.rank()}. Give vocab_start, "
            f"and vocab_size where the shards are unequal or padded."
        )
    return rows * group.size()
