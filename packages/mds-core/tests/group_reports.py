"""What a rank finds out about its groups and the collectives, run on four ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mds_core import collectives
from mds_core.groups import Layout, ProcessGroups


def input_of(rank: int) -> torch.Tensor:
    """[2, 8, 1] numbers that name rank and place."""
    return (torch.arange(16.0).view(2, 8, 1) + 100 * rank).double()


def gradient_of(rank: int, shape: torch.Size) -> torch.Tensor:
    return (torch.arange(float(shape.numel())).view(shape) * (rank + 1)).double()


def total(make) -> torch.Tensor:
    return sum(make(rank) for rank in range(4))


def samples_of(rank: int) -> torch.Tensor:
    """[4, 4, 1], the numbers of `input_of` as four samples."""
    return input_of(rank).view(4, 4, 1)


ALL = torch.cat([input_of(rank) for rank in range(4)], dim=1)
WIDE, NARROW = torch.Size([2, 32, 1]), torch.Size([2, 2, 1])
FULL, LONG = torch.Size([2, 8, 1]), torch.Size([1, 16, 1])
WANTED = {
    "copy": (input_of, lambda _: total(lambda r: gradient_of(r, FULL))),
    "reduce": (lambda _: total(input_of), lambda rank: gradient_of(rank, FULL)),
    "gather": (lambda _: ALL, lambda rank: gradient_of(rank, WIDE).chunk(4, 1)[rank]),
    "scatter": (
        lambda rank: input_of(rank).chunk(4, 1)[rank],
        lambda _: torch.cat([gradient_of(r, NARROW) for r in range(4)], 1),
    ),
    "gather_partial": (
        lambda _: ALL,
        lambda rank: total(lambda r: gradient_of(r, WIDE)).chunk(4, 1)[rank],
    ),
    "exchange": (  # split by sample, join by position
        lambda rank: torch.cat([samples_of(r).chunk(4, 0)[rank] for r in range(4)], 1),
        lambda rank: torch.cat([gradient_of(r, LONG).chunk(4, 1)[rank] for r in range(4)], 0),
    ),
    "reduce_scatter": (
        lambda rank: total(input_of).chunk(4, 1)[rank],
        lambda _: torch.cat([gradient_of(r, NARROW) for r in range(4)], 1),
    ),
}
"""Of each collective: its result and its input's gradient, by rank."""
OPTIONS = {"copy": {}, "reduce": {}, "exchange": {"split": 0, "join": 1}}


def report_all() -> dict:
    """Run on each rank: its groups under several layouts, and every collective."""
    layouts = {
        "tp2dp2": Layout(tp_size=2, dp_size=2, ep_size=2),
        "tp2pp2": Layout(tp_size=2, pp_size=2),
        "pp4": Layout(pp_size=4),
        "ulysses2ep2": Layout(ulysses_size=2, dp_size=2, ep_size=2),
        "ulysses2dp2": Layout(ulysses_size=2, dp_size=2),
        "tp4": Layout(tp_size=4),
    }
    built = {name: ProcessGroups.build(layout) for name, layout in layouts.items()}
    axes = [
        *("tp", "pp", "dp", "ulysses", "ep", "dp_ulysses"),
        *("expert_dp", "expert_dp_ulysses", "model", "embedding"),
    ]
    found = {
        name: {axis: ranks_of(getattr(groups, axis)) for axis in axes}
        for name, groups in built.items()
    }
    group = built["tp4"].tp
    return (
        found
        | {name: run_collective(name, group) for name in WANTED}
        | {"uneven": uneven(group), "rows": exchange_rows(group)}
    )


def ranks_of(group) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


def run_collective(name: str, group) -> tuple[torch.Tensor, torch.Tensor]:
    make = samples_of if name == "exchange" else input_of
    x = make(group.rank()).requires_grad_()
    y = getattr(collectives, name)(x, group=group, **OPTIONS.get(name, {"dim": 1}))
    y.backward(gradient_of(group.rank(), y.shape))
    return y.detach(), x.grad


def exchange_rows(group) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank r sends r + i rows to rank i; each names its sender, its receiver and its place."""
    rank, size = group.rank(), group.size()
    rows = [(rank, to, place) for to in range(size) for place in range(rank + to)]
    x = torch.tensor(rows, dtype=torch.float64).view(-1, 3).requires_grad_()
    counts = [rank + other for other in range(size)]
    y = collectives.exchange_rows(x, group=group, given=counts, taken=counts)
    (y * (rank + 1)).sum().backward()
    return y.detach(), x.grad


def uneven(group) -> str:
    try:
        collectives.scatter(torch.zeros(3, 6), group=group, dim=1)
    except ValueError as error:
        return str(error)
    return "no error"
