"""Muon's matrices: put together from all ranks' parts, orthogonalised on one rank, dealt out.

Every matrix has an owner among the ranks of its pipeline stage. Each rank adds its part to zeros
and the sum goes to the owner, which is exact; the owner's result goes to all. So the work of the
iterations is shared, and the traffic is that of one more sum over the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mds_core.groups import ProcessGroups, group_rank
from mds_core.sharding import ParameterShard, cut
from mds_train.engines.interface import Fragment
from mds_train.optimizers.muon import orthogonalized, step_scale

__all__ = ["MatrixExchange", "SteppedTensor"]

_AT_ONCE = 1 << 25
"""Elements of the matrices that are whole at one time, 128 MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SteppedTensor:
    """A tensor that the optimizer steps, and what this rank has in it."""

    tensor: Tensor
    names: tuple[str, ...]
    """All parameters that it is cut from, those that this rank has nothing of too: the same on
    all ranks."""

    fragments: tuple[Fragment, ...]


class MatrixExchange:
    """`mds_train.optimizers.muon.Orthogonalize` for one rank.

    Args:
        places: Tells of all tensors that are stepped; asked at the first step.
        shards: This rank's part of every parameter.
        groups: Its process groups.
        dtype: What matrices are orthogonalised in.
    """

    def __init__(
        self,
        places: Callable[[], Sequence[SteppedTensor]],
        shards: Mapping[str, ParameterShard],
        *,
        groups: ProcessGroups,
        dtype: torch.dtype,
    ) -> None:
        self._places, self._shards, self._groups = places, shards, groups
        self._dtype = dtype
        self._known: dict[int, SteppedTensor] = {}
        self._ranks, self._group = _stage_group(groups)

    def __call__(self, stepped: Sequence[Tensor], updates: Sequence[Tensor]) -> None:
        """Replace the updates by those of the orthogonalised matrices."""
        if not self._known:
            self._known = {id(place.tensor): place for place in self._places()}
        parts = {
            fragment.name: self._part(fragment, tensor, update)
            for tensor, update in zip(stepped, updates, strict=True)
            for fragment in self._known[id(tensor)].fragments
        }
        names = [name for tensor in stepped for name in self._known[id(tensor)].names]
        for chunk in _chunks(names, self._shards):
            self._replace(chunk, parts)

    def _part(self, fragment: Fragment, stepped: Tensor, update: Tensor) -> _Part:
        offset = fragment.master.storage_offset() - stepped.storage_offset()
        flat = update.view(-1).narrow(0, offset, fragment.numel)
        return _Part(fragment=fragment, update=flat)

    def _replace(self, names: Sequence[str], parts: Mapping[str, _Part]) -> None:
        wholes = [self._contribution(name, parts.get(name)) for name in names]
        owners = [self._ranks[index % len(self._ranks)] for index in range(len(names))]
        if self._group is not None:
            _wait(
                dist.reduce(whole, dst=owner, group=self._group, async_op=True)
                for whole, owner in zip(wholes, owners, strict=True)
            )
        for whole, owner in zip(wholes, owners, strict=True):
            if owner == self._groups.rank:
                found = orthogonalized(whole, dtype=self._dtype)
                torch.mul(found, step_scale(whole.shape), out=whole)
        if self._group is not None:
            _wait(
                dist.broadcast(whole, src=owner, group=self._group, async_op=True)
                for whole, owner in zip(wholes, owners, strict=True)
            )
        for name, whole in zip(names, wholes, strict=True):
            if name in parts:
                self._take(parts[name], whole)

    def _contribution(self, name: str, part: _Part | None) -> Tensor:
        """This rank's elements in a matrix of zeros; of copies only the first rank's count."""
        shard = self._shards[name]
        device = self._device()
        whole = torch.zeros(shard.global_shape, dtype=torch.float32, device=device)
        if part is None or (shard.whole and self._groups.tp_rank != 0):
            return whole
        if part.fragment.replicated and group_rank(self._groups.dp_ulysses) != 0:
            return whole
        fragment = part.fragment
        local = torch.zeros(shard.local_shape, dtype=torch.float32, device=device)
        local.view(-1)[fragment.start : fragment.start + fragment.numel] = part.update
        _lay(local, shard, into=whole)
        return whole

    def _device(self) -> torch.device:
        return next(iter(self._known.values())).tensor.device

    def _take(self, part: _Part, whole: Tensor) -> None:
        fragment = part.fragment
        local = cut(self._shards[fragment.name], whole).view(-1)
        part.update.copy_(local[fragment.start : fragment.start + fragment.numel])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A fragment and its update, a view of the tensor that is to be replaced."""

    fragment: Fragment
    update: Tensor


def _stage_group(groups: ProcessGroups) -> tuple[list[int], dist.ProcessGroup | None]:
    """The ranks that together hold this rank's stage, all its copies."""
    layout = groups.layout
    if layout.world_size == 1:
        return [groups.rank], None
    stage = layout.coordinates(groups.rank).pp
    ranks = layout.partition(lambda place: place.pp)[stage]
    if len(ranks) == 1:
        return ranks, None
    return ranks, dist.new_group(ranks, timeout=groups.timeout, use_local_synchronization=True)


def _chunks(names: Sequence[str], shards: Mapping[str, ParameterShard]) -> list[list[str]]:
    chunks: list[list[str]] = [[]]
    held = 0
    for name in names:
        size = torch.Size(shards[name].global_shape).numel()
        if chunks[-1] and held + size > _AT_ONCE:
            chunks.append([])
            held = 0
        chunks[-1].append(name)
        held += size
    return [chunk for chunk in chunks if chunk]


def _lay(local: Tensor, shard: ParameterShard, *, into: Tensor) -> None:
    """Copy a rank's tensor to where it belongs in the whole one; padding is left out."""
    if shard.dim is None:
        into.copy_(local)
        return
    at = 0
    for low, high in shard.ranges:
        into.narrow(shard.dim, low, high - low).copy_(local.narrow(shard.dim, at, high - low))
        at += high - low


def _wait(works: Iterable[dist.Work | None]) -> None:
    """Start all of them, then wait for each."""
    for work in list(works):
        if work is not None:
            work.wait()
