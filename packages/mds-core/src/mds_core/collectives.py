"""Differentiable communication between the ranks of one group.

Each function names what happens forward; its backward is the adjoint:

==================  ==========================  ==========================
function            forward                     backward
==================  ==========================  ==========================
copy                nothing                     sum over the group
reduce              sum over the group          nothing
gather              join the ranks' slices      take the own slice
scatter             take the own slice          join the ranks' slices
gather_partial      join the ranks' slices      sum, then the own slice
reduce_scatter      sum, then the own slice     join the ranks' slices
exchange            split here, join there      split there, join here
exchange_rows       send rows to their ranks    send their gradients back
==================  ==========================  ==========================

``gather`` is for a result that every rank goes on to use in the same way; ``gather_partial`` for
one of which each rank uses another part, so that the gradients are partial sums. A group of None
does nothing at all.

``start_gather`` and ``start_reduce_scatter`` are not differentiable: the backward passes of other
functions send with them while they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = [
    "copy",
    "exchange",
    "exchange_rows",
    "gather",
    "gather_partial",
    "reduce",
    "reduce_scatter",
    "scatter",
    "start_gather",
    "start_reduce_scatter",
]


def copy(x: Tensor, *, group: ProcessGroup | None) -> Tensor:
    """Use one replicated tensor on every rank; its gradient is the sum of the ranks' gradients."""
    return x if group is None else _apply(_Copy, x, group)


def reduce(x: Tensor, *, group: ProcessGroup | None) -> Tensor:
    """Sum the ranks' tensors; every rank gets the sum."""
    return x if group is None else _apply(_Reduce, x, group)


def gather(x: Tensor, *, group: ProcessGroup | None, dim: int) -> Tensor:
    """Join the ranks' slices along ``dim`` in rank order; the result is used alike everywhere."""
    return x if group is None else _apply(_Gather, x, group, dim)


def scatter(x: Tensor, *, group: ProcessGroup | None, dim: int) -> Tensor:
    """Keep this rank's slice along ``dim`` of a replicated tensor."""
    return x if group is None else _apply(_Scatter, x, group, dim)


def gather_partial(x: Tensor, *, group: ProcessGroup | None, dim: int) -> Tensor:
    """Join the ranks' slices along ``dim`` where each rank's gradient is only a partial sum."""
    return x if group is None else _apply(_GatherPartial, x, group, dim)


def reduce_scatter(x: Tensor, *, group: ProcessGroup | None, dim: int) -> Tensor:
    """Sum the ranks' tensors and keep this rank's slice along ``dim``."""
    return x if group is None else _apply(_ReduceScatter, x, group, dim)


def exchange(x: Tensor, *, group: ProcessGroup | None, split: int, join: int) -> Tensor:
    """Give every rank its slice along ``split`` and join what the ranks give along ``join``."""
    return x if group is None else _apply(_Exchange, x, group, split, join)


def exchange_rows(
    x: Tensor, *, group: ProcessGroup | None, given: Sequence[int], taken: Sequence[int]
) -> Tensor:
    """Send each rank its rows of ``x`` and join what the ranks send here, in rank order.

    Args:
        x: [rows, ...], the first rank's rows first.
        group: The ranks.
        given: Rows of ``x`` for each rank.
        taken: Rows that each rank sends here.

    Returns:
        [sum of taken, ...].
    """
    return x if group is None else _apply(_ExchangeRows, x, group, tuple(given), tuple(taken))


def start_gather(x: Tensor, *, group: ProcessGroup | None, dim: int) -> Callable[[], Tensor]:
    """Begin to join the ranks' slices along ``dim``; the result waits for them."""
    if group is None:
        return lambda: x
    mine = x.contiguous()
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    work = dist.all_gather(parts, mine, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return torch.cat(parts, dim=dim)

    return finish


def start_reduce_scatter(
    x: Tensor, *, group: ProcessGroup | None, dim: int
) -> Callable[[], Tensor]:
    """Begin to sum the ranks' tensors; the result waits for this rank's slice along ``dim``."""
    if group is None:
        return lambda: x
    parts = [part.contiguous() for part in x.chunk(group.size(), dim=dim)]
    mine = torch.empty_like(parts[group.rank()])
    work = dist.reduce_scatter(mine, parts, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return mine

    return finish


def _apply(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    return cast("Tensor", function.apply(*arguments))  # type: ignore[no-untyped-call]


def _sum(x: Tensor, group: ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _join(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return start_gather(x, group=group, dim=dim)()


def _swap(x: Tensor, group: ProcessGroup, split: int, join: int) -> Tensor:
    if x.size(split) % group.size():
        _own(x, group, split)  # raises with the sizes
    given = torch.stack(x.chunk(group.size(), dim=split))
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given, group=group)
    return torch.cat(taken.unbind(0), dim=join)


def _swap_rows(
    x: Tensor, group: ProcessGroup, given: tuple[int, ...], taken: tuple[int, ...]
) -> Tensor:
    received = x.new_empty((sum(taken), *x.shape[1:]))
    dist.all_to_all_single(received, x.contiguous(), list(taken), list(given), group=group)
    return received


def _own(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    size = group.size()
    if x.size(dim) % size:
        raise ValueError(
            f"dimension {dim} of a {tuple(x.shape)} tensor does not divide into {size} equal "
            f"slices; choose an extent that is a multiple of the group's size."
        )
    return x.chunk(size, dim=dim)[group.rank()].contiguous()


def _sum_own(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return start_reduce_scatter(x, group=group, dim=dim)()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum(grads[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        del ctx
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _join(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _own(grads[0], ctx.group, ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _own(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _join(grads[0], ctx.group, ctx.dim), None, None


class _GatherPartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _join(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _sum_own(grads[0], ctx.group, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        if x.size(dim) % group.size():
            _own(x, group, dim)  # raises with the sizes
        return _sum_own(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _join(grads[0], ctx.group, ctx.dim), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, split: int, join: int) -> Tensor:
        ctx.group, ctx.split, ctx.join = group, split, join
        return _swap(x, group, split, join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _swap(grads[0], ctx.group, ctx.join, ctx.split), None, None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: ProcessGroup, given: tuple[int, ...], taken: tuple[int, ...]
    ) -> Tensor:
        ctx.group, ctx.given, ctx.taken = group, given, taken
        return _swap_rows(x, group, given, taken)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _swap_rows(grads[0], ctx.group, ctx.taken, ctx.given), None, None, None
