"""Forward passes only: hand the hidden states of each micro batch from stage to stage.

torch's own forward-only mode fails where a rank holds two neighbouring stages, as V schedules do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["relay"]


def relay(
    stages: Mapping[int, Callable[..., Tensor]],
    micro_batches: Sequence[tuple[Tensor, Mapping[str, Tensor]]],
    *,
    owners: Sequence[int],
    group: ProcessGroup,
    buffer: Callable[[Tensor], Tensor],
) -> None:
    """Run every stage on every micro batch; the last stage keeps what it computes itself.

    Every rank walks through (micro batch, stage) in the same order, so sends and receives meet.

    Args:
        stages: This rank's stages by index.
        micro_batches: Tokens of each, and what all stages get beside their input.
        owners: Rank of each stage in ``group``.
        group: Ranks of the stages.
        buffer: Makes room for the hidden states of the given tokens.
    """
    me = group.rank()
    for tokens, shared in micro_batches:
        hidden: Tensor | None = tokens
        for index, owner in enumerate(owners):
            if owner != me:
                continue
            if index and owners[index - 1] != me:
                hidden = buffer(tokens)
                dist.recv(hidden, group=group, group_src=owners[index - 1])
            hidden = stages[index](hidden, **shared)
            if index + 1 < len(owners) and owners[index + 1] != me:
                dist.send(hidden.contiguous(), group=group, group_dst=owners[index + 1])
