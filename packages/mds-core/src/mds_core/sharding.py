"""Which part of a global parameter a rank holds. Arithmetic first; two torch helpers at the end.

A *box* is, for each dimension of the global tensor, a half-open range. It speaks the language of
the checkpoint format, so a trainer saves its slices without knowing how a layer was split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

__all__ = ["Box", "ParameterShard", "Piece", "cut", "flat_pieces", "merge"]

Box = tuple[tuple[int, int], ...]
"""For each dimension of a global tensor a half-open range ``(start, stop)``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShard:
    """One rank's part of a parameter.

    The local tensor is the concatenation along ``dim`` of the global ``ranges``, followed by
    padding rows that are no part of the model.

    Attributes:
        name: Canonical name.
        global_shape: Shape of the whole parameter, with the true vocabulary.
        local_shape: Shape of this rank's tensor, padding included.
        dim: The split dimension; None if every tensor-parallel rank holds the whole parameter.
        ranges: Global half-open ranges along ``dim``, in local order; empty if ``dim`` is None.
    """

    name: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.dim is None:
            if self.ranges or self.local_shape != self.global_shape:
                raise ValueError(
                    f"{self.name} is not split, so its local shape {self.local_shape} must be its "
                    f"global shape {self.global_shape} and it has no ranges."
                )
            return
        held = sum(stop - start for start, stop in self.ranges)
        whole = list(self.global_shape)
        whole[self.dim] = self.local_shape[self.dim]
        if tuple(whole) != self.local_shape or held > self.local_shape[self.dim]:
            raise ValueError(
                f"{self.name}: local shape {self.local_shape} does not hold the ranges "
                f"{self.ranges} of dimension {self.dim} of {self.global_shape}."
            )

    @property
    def whole(self) -> bool:
        """Whether this rank holds all of it, as of a parameter that could be split and is not."""
        held = sum(stop - start for start, stop in self.ranges)
        return self.dim is None or held == self.global_shape[self.dim]

    def boxes(self) -> tuple[Box, ...]:
        """Global boxes in local order; each is contiguous in the flattened local tensor."""
        return tuple(box for box, _ in _boxes_with_start(self))


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive elements of a box.

    Attributes:
        box: Where the elements belong in the global tensor.
        flat: Half-open range of the box's elements in row-major order; None for the whole box.
        offset: Where the elements begin, counted from the start of the asked range.
    """

    box: Box
    flat: tuple[int, int] | None
    offset: int


def flat_pieces(shard: ParameterShard, start: int, stop: int) -> list[Piece]:
    """Say what the elements ``[start, stop)`` of a flattened local tensor are globally.

    ZeRO cuts flattened tensors at any element; a checkpoint needs to know what each cut holds.
    Padding belongs to no piece.

    Args:
        shard: The local tensor.
        start: First element, counted in the row-major local tensor.
        stop: One past the last element.

    Returns:
        One piece for each box that the range touches, in local order.
    """
    size = math.prod(shard.local_shape)
    if not 0 <= start <= stop <= size:
        raise ValueError(
            f"[{start}, {stop}) is not a range of the {size} elements that this rank holds of "
            f"{shard.name}."
        )
    return list(_overlaps(_boxes_with_start(shard), start, stop))


def _overlaps(boxes: Iterable[tuple[Box, int]], start: int, stop: int) -> Iterator[Piece]:
    for box, begin in boxes:
        size = math.prod(high - low for low, high in box)
        low, high = max(start, begin), min(stop, begin + size)
        if low < high:
            whole = high - low == size
            yield Piece(box, None if whole else (low - begin, high - begin), low - start)


def _boxes_with_start(shard: ParameterShard) -> Iterator[tuple[Box, int]]:
    """Boxes that are contiguous in the flattened local tensor, each with its first element."""
    full = [(0, extent) for extent in shard.global_shape]
    if shard.dim is None:
        yield tuple(full), 0
        return
    dim, local_extent = shard.dim, shard.local_shape[shard.dim]
    inner = math.prod(shard.global_shape[dim + 1 :])
    single = len(shard.ranges) == 1 and shard.ranges[0][1] - shard.ranges[0][0] == local_extent
    outer = [range(1)] if single else [range(extent) for extent in shard.global_shape[:dim]]
    for row, index in enumerate(product(*outer)):
        before = full[:dim] if single else [(i, i + 1) for i in index]
        begin = row * local_extent * inner
        for low, high in shard.ranges:
            if high > low:
                yield (*before, (low, high), *full[dim + 1 :]), begin
            begin += (high - low) * inner


def cut(shard: ParameterShard, global_tensor: Tensor) -> Tensor:
    """Return this rank's tensor of a global one; padding rows are zero."""
    if tuple(global_tensor.shape) != shard.global_shape:
        raise ValueError(
            f"{shard.name} has the shape {shard.global_shape}, not {tuple(global_tensor.shape)}."
        )
    if shard.dim is None:
        return global_tensor.clone()
    parts = [global_tensor.narrow(shard.dim, low, high - low) for low, high in shard.ranges]
    held = sum(high - low for low, high in shard.ranges)
    padding = list(shard.local_shape)
    padding[shard.dim] -= held
    return torch.cat([*parts, global_tensor.new_zeros(padding)], dim=shard.dim)


def merge(shards: Sequence[ParameterShard], tensors: Sequence[Tensor]) -> Tensor:
    """Join the tensor-parallel ranks' tensors into the global one; padding is dropped."""
    first = shards[0]
    if first.dim is None:
        return tensors[0].clone()
    whole = tensors[0].new_empty(first.global_shape)
    for shard, tensor in zip(shards, tensors, strict=True):
        begin = 0
        for low, high in shard.ranges:
            source = tensor.narrow(first.dim, begin, high - low)
            whole.narrow(first.dim, low, high - low).copy_(source)
            begin += high - low
    return whole
