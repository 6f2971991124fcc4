"""Which ranks work together: the layout of a run and this rank's process groups.

A layout is arithmetic and needs no ranks. ``None`` stands for a group of one everywhere, so that a
layer runs unchanged on a laptop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import NamedTuple, Self

import torch.distributed as dist
from torch.distributed import ProcessGroup

__all__ = ["Coordinates", "Layout", "ProcessGroups", "group_rank", "group_size"]


class Coordinates(NamedTuple):
    """Place of a rank along each axis of a layout."""

    tp: int
    ulysses: int
    dp: int
    pp: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Sizes of the parallelism axes; ranks count tp fastest, then ulysses, dp, pp.

    Expert parallelism divides the data-parallel axis: ``ep_size`` neighbours along it share one
    set of experts.
    """

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    ulysses_size: int = 1
    ep_size: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} ({getattr(self, field.name)}) must be at least 1.")
        if self.dp_size % self.ep_size:
            raise ValueError(
                f"dp_size ({self.dp_size}) is not a multiple of ep_size ({self.ep_size}); experts "
                f"are shared by equal parts of the data-parallel ranks. Change one of the two."
            )

    @property
    def world_size(self) -> int:
        """Ranks in the whole run."""
        return self.tp_size * self.ulysses_size * self.dp_size * self.pp_size

    def coordinates(self, rank: int) -> Coordinates:
        """Where ``rank`` stands along each axis."""
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank ({rank}) is outside this layout of {self.world_size} ranks; start exactly "
                f"that many processes or change the sizes."
            )
        rest, tp = divmod(rank, self.tp_size)
        rest, ulysses = divmod(rest, self.ulysses_size)
        pp, dp = divmod(rest, self.dp_size)
        return Coordinates(tp=tp, ulysses=ulysses, dp=dp, pp=pp)

    def partition(self, key: Callable[[Coordinates], object]) -> list[list[int]]:
        """Ranks grouped by equal ``key`` of their coordinates, in rank order."""
        parts: dict[object, list[int]] = {}
        for rank in range(self.world_size):
            parts.setdefault(key(self.coordinates(rank)), []).append(rank)
        return list(parts.values())


def group_size(group: ProcessGroup | None) -> int:
    """Ranks in ``group``; None counts one."""
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    """This process's place in ``group``; 0 in a group of one."""
    return 0 if group is None else group.rank()


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessGroups:
    """The groups that this rank belongs to; complete when constructed, never changed.

    Attributes:
        layout: Sizes that the groups were built from.
        rank: This process's place in the whole layout.
        tp: Ranks that share each layer.
        pp: Ranks that hold the successive stages of one replica.
        dp: Ranks that hold the same slice and see other samples.
        ulysses: Ranks that share each sequence.
        ep: Ranks that share one set of experts (a part of ``dp``).
        dp_ulysses: Ranks over which a gradient is summed: ``dp`` and ``ulysses`` together.
        expert_dp: Ranks that hold the same experts.
        expert_dp_ulysses: Ranks over which an expert's gradient is summed: ``expert_dp`` and
            ``ulysses`` together.
        model: Ranks of one replica of the parameters: ``tp`` and ``pp`` together.
        embedding: First and last stage, which share a tied embedding; None on stages between.
        backend: What the groups were built with; the default group's if None.
        timeout: How long a collective of theirs waits; as long as the default group's if None.
    """

    layout: Layout
    rank: int
    tp: ProcessGroup | None = None
    pp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    ulysses: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    dp_ulysses: ProcessGroup | None = None
    expert_dp: ProcessGroup | None = None
    expert_dp_ulysses: ProcessGroup | None = None
    model: ProcessGroup | None = None
    embedding: ProcessGroup | None = None
    backend: str | None = None
    timeout: timedelta | None = None

    @classmethod
    def single(cls) -> Self:
        """One process, no communication."""
        return cls(layout=Layout(), rank=0)

    @classmethod
    def build(
        cls, layout: Layout, *, backend: str | None = None, timeout: timedelta | None = None
    ) -> Self:
        """Create this rank's groups; every rank calls it with the same layout.

        Args:
            layout: Sizes of the axes; their product must be the number of processes.
            backend: ``gloo``, ``nccl`` or what the accelerator names; the default group's if None.
            timeout: How long a collective waits before it is an error; the default group's if None.

        Raises:
            ValueError: The number of running processes differs from the layout's.
        """
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size != layout.world_size:
            raise ValueError(
                f"the layout needs {layout.world_size} processes (tp {layout.tp_size} x ulysses "
                f"{layout.ulysses_size} x dp {layout.dp_size} x pp {layout.pp_size}) but "
                f"{world_size} run. Start that many with torchrun, call init_process_group "
                f"first, or change the sizes."
            )
        rank = dist.get_rank() if dist.is_initialized() else 0

        def own(ranks_of_groups: list[list[int]]) -> ProcessGroup | None:
            return _own_group(ranks_of_groups, rank=rank, backend=backend, timeout=timeout)

        # Every rank creates every group in this order; another order would deadlock.
        return cls(
            layout=layout,
            rank=rank,
            backend=backend,
            timeout=timeout,
            **{axis: own(ranks) for axis, ranks in _memberships(layout).items()},
        )

    def along_pipeline(self, places: Sequence[int]) -> ProcessGroup | None:
        """The ranks at these places along ``pp`` of each replica; every rank calls it alike.

        Args:
            places: Rising places along the pipeline.

        Returns:
            The group that this rank is in; None if it is in none, or alone.
        """
        if list(places) == [0, self.pp_size - 1]:
            return self.embedding
        pipelines = self.layout.partition(lambda c: (c.tp, c.ulysses, c.dp))
        chosen = [[ranks[place] for place in places] for ranks in pipelines]
        return _own_group(chosen, rank=self.rank, backend=self.backend, timeout=self.timeout)

    @property
    def tp_size(self) -> int:
        """Ranks that share each layer."""
        return self.layout.tp_size

    @property
    def pp_size(self) -> int:
        """Pipeline stages, each on its own ranks."""
        return self.layout.pp_size

    @property
    def dp_size(self) -> int:
        """Replicas that see other samples."""
        return self.layout.dp_size

    @property
    def ulysses_size(self) -> int:
        """Ranks that share each sequence."""
        return self.layout.ulysses_size

    @property
    def ep_size(self) -> int:
        """Ranks that share one set of experts."""
        return self.layout.ep_size

    @property
    def tp_rank(self) -> int:
        """Place among the ranks that share each layer."""
        return self.layout.coordinates(self.rank).tp

    @property
    def pp_rank(self) -> int:
        """Place along the pipeline."""
        return self.layout.coordinates(self.rank).pp

    @property
    def dp_rank(self) -> int:
        """Place among the replicas."""
        return self.layout.coordinates(self.rank).dp

    @property
    def ulysses_rank(self) -> int:
        """Place along the sequence."""
        return self.layout.coordinates(self.rank).ulysses

    @property
    def ep_rank(self) -> int:
        """Place among the ranks that share one set of experts."""
        return self.dp_rank % self.layout.ep_size


def _memberships(layout: Layout) -> dict[str, list[list[int]]]:
    """Ranks of every group of every kind, in the order of their creation."""
    ep = layout.ep_size
    pipelines = layout.partition(lambda c: (c.tp, c.ulysses, c.dp))
    return {
        "tp": layout.partition(lambda c: (c.ulysses, c.dp, c.pp)),
        "pp": pipelines,
        "dp": layout.partition(lambda c: (c.tp, c.ulysses, c.pp)),
        "ulysses": layout.partition(lambda c: (c.tp, c.dp, c.pp)),
        "ep": layout.partition(lambda c: (c.tp, c.ulysses, c.pp, c.dp // ep)),
        "dp_ulysses": layout.partition(lambda c: (c.tp, c.pp)),
        "expert_dp": layout.partition(lambda c: (c.tp, c.ulysses, c.pp, c.dp % ep)),
        "expert_dp_ulysses": layout.partition(lambda c: (c.tp, c.pp, c.dp % ep)),
        "model": layout.partition(lambda c: (c.ulysses, c.dp)),
        "embedding": [[ranks[0], ranks[-1]] if len(ranks) > 1 else ranks for ranks in pipelines],
    }


def _own_group(
    ranks_of_groups: list[list[int]],
    *,
    rank: int,
    backend: str | None,
    timeout: timedelta | None,
) -> ProcessGroup | None:
    """Create all groups of more than one rank; return the one that ``rank`` is in."""
    own = None
    for ranks in ranks_of_groups:
        if len(ranks) == 1:
            continue
        group = dist.new_group(ranks, timeout=timeout, backend=backend)
        if rank in ranks:
            own = group
    return own
