"""Forward passes only: hand the hidden states of each micro batch from stage to stage.

torch's own forward-only mode fails where a rank holds two neighbouring stages, as V schedules do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["MicroBatch", "relay"]


class MicroBatch(NamedTuple):
    """One part of a batch."""

    tokens: Tensor
    """[b, s], the input of the first stage."""
    shared: Mapping[str, Tensor]
    """What all stages get beside their input."""


def relay(
    stages: Mapping[int, Callable[..., Tensor]],
    micro_batches: Sequence[MicroBatch],
    *,
    owners: Sequence[int],
    group: ProcessGroup,
    buffer: Callable[[int, MicroBatch], Tensor],
) -> None:
    """Run every stage on every micro batch; the last stage keeps what it computes itself.

    Every rank walks through (micro batch, stage) in the same order, so sends and receives meet.

    Args:
        stages: This rank's stages by index.
        micro_batches: The parts of the batch.
        owners: Rank of each stage in ``group``.
        group: Ranks of the stages.
        buffer: Makes room for what the stage of this index gets.
    """
    me = group.rank()
    for micro_batch in micro_batches:
        hidden: Tensor | None = micro_batch.tokens
        for index, owner in enumerate(owners):
            if owner != me:
                continue
            if index and owners[index - 1] != me:
                hidden = buffer(index, micro_batch)
                dist.recv(hidden, group=group, group_src=owners[index - 1])
            hidden = stages[index](hidden, **micro_batch.shared)
            if index + 1 < len(owners) and owners[index + 1] != me:
                dist.send(hidden.contiguous(), group=group, group_dst=owners[index + 1])
