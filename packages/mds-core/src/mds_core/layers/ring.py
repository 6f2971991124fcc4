"""Attention over a sequence that several ranks hold: keys and values go round, queries stay.

Each rank holds an early and a late stretch of the sequence, so that causal attention gives all the
same work. With one rank nothing goes round, and attention is merely cut into tiles.

Shapes: ``b`` micro batch, ``s`` positions of this rank, ``n`` query heads and ``g`` key/value heads
of this rank, ``d`` head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mds_core.groups import group_rank, group_size
from mds_core.layers.tiles import Merge, Tiles, add_gradients

__all__ = ["ring_attention", "zigzag"]


def zigzag(length: int, *, ranks: int) -> tuple[tuple[range, ...], ...]:
    """Positions of each rank: the sequence in twice as many stretches, one from each end.

    >>> zigzag(8, ranks=2)
    ((range(0, 2), range(6, 8)), (range(2, 4), range(4, 6)))

    Raises:
        ValueError: The length does not divide.
    """
    step, rest = divmod(length, 2 * ranks)
    if rest:
        raise ValueError(
            f"the sequence length ({length}) is not a multiple of {2 * ranks}, twice the ranks "
            f"that share a sequence as a ring. Pad the sequence or change the layout."
        )
    stretches = [range(i * step, (i + 1) * step) for i in range(2 * ranks)]
    return tuple((stretches[rank], stretches[-1 - rank]) for rank in range(ranks))


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, tiles: Tiles, *, group: ProcessGroup | None
) -> Tensor:
    """Attend to the keys and values of all ranks of ``group``.

    Args:
        query: [b, n, s, d].
        key: [b, g, s, d], n a multiple of g.
        value: [b, g, s, d].
        tiles: Who holds and sees what.
        group: The ring; None for one rank.

    Returns:
        [b, n, s, d].
    """
    attended = _RingAttention.apply(query, key, value, tiles, group)  # type: ignore[no-untyped-call]
    return cast("Tensor", attended)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tiles: Tiles,
        group: ProcessGroup | None,
    ) -> Tensor:
        merge = Merge(query, tiles)
        for place, pair in _around(torch.stack([key, value]), group):
            merge.add(place, *pair.unbind(0))
        attended, log_sum = merge.result()
        ctx.save_for_backward(query, key, value, attended, log_sum)
        ctx.tiles, ctx.group = tiles, group
        return attended

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, attended, log_sum = ctx.saved_tensors
        (gradient,) = grads
        precision = log_sum.dtype
        share = (gradient.to(precision) * attended.to(precision)).sum(-1, keepdim=True)
        query_gradient = torch.zeros_like(query, dtype=precision)
        pair = torch.stack([key, value])
        pair_gradient = torch.zeros_like(pair, dtype=precision)
        for place, current in _around(pair, ctx.group):
            # The gradients follow their keys and values, one hop behind.
            if place != group_rank(ctx.group):
                pair_gradient = _passed_on(pair_gradient, ctx.group)
            add_gradients(
                ctx.tiles,
                place,
                query=query,
                pair=current,
                log_sum=log_sum,
                gradient=gradient,
                share=share,
                query_gradient=query_gradient,
                pair_gradient=pair_gradient,
            )
        if ctx.group is not None:
            pair_gradient = _passed_on(pair_gradient, ctx.group)  # the last hop home
        d_key, d_value = pair_gradient.to(key.dtype).unbind(0)
        return query_gradient.to(query.dtype), d_key, d_value, None, None


def _around(pair: Tensor, group: ProcessGroup | None) -> Iterator[tuple[int, Tensor]]:
    """Every rank's tensor once, the own first, each on its way while the one before is in use."""
    size, rank = group_size(group), group_rank(group)
    for hop in range(size):
        last = hop + 1 == size or group is None
        arriving = None if last else torch.empty_like(pair)
        requests = [] if arriving is None else _start(pair, arriving, group)
        yield (rank - hop) % size, pair
        for request in requests:
            request.wait()
        pair = pair if arriving is None else arriving


def _passed_on(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Give ``x`` to the next rank and take that of the one before."""
    arriving = torch.empty_like(x)
    for request in _start(x, arriving, group):
        request.wait()
    return arriving


def _start(given: Tensor, taken: Tensor, group: ProcessGroup | None) -> list[dist.Work]:
    size, rank = group_size(group), group_rank(group)
    operations = [
        dist.P2POp(dist.isend, given, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, taken, group=group, group_peer=(rank - 1) % size),
    ]
    return dist.batch_isend_irecv(operations)
