"""Where the elements of one rank's local tensor belong in the whole one. Pure arithmetic, no files.

A local tensor is, along one dimension, the concatenation of ranges of the whole tensor, and then
padding rows that belong to nothing. Flattened, each range of rows is one run of elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mds_ckpt.megatron.naming import Named
from mds_ckpt.tensors.box import Box, Range, size, whole
from mds_ckpt.tensors.qkv import Heads, Layout, fused_rows, key_value_rows, query_rows

__all__ = ["ModelFacts", "Part", "Shard", "divide_layers", "pieces", "shard_of", "whole_shape"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What the arithmetic needs to know of a model."""

    heads: Heads | None = None
    layout: Layout = "grouped"
    is_gated: bool = False
    vocab_size: int | None = None
    """The true vocabulary; None keeps the padding rows."""
    tp_size: int = 1


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part: the whole shape, and ranges of the split dimension in local order."""

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dim: int | None
    ranges: tuple[Range, ...] = ()

    def boxes(self) -> Iterator[tuple[int, Box]]:
        """Boxes of the whole tensor, each with where it begins in the flattened local one."""
        if self.dim is None:
            yield 0, whole(self.shape)
            return
        if self.dim and len(self.ranges) != 1:
            raise ValueError("only rows can be in another order")
        row = math.prod(self.local_shape[self.dim + 1 :])
        at = 0
        for start, stop in self.ranges:
            box = list(whole(self.shape))
            box[self.dim] = (start, stop)
            yield at * row, tuple(box)
            at += stop - start


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive elements of a box, and where they begin in the range that was asked for."""

    box: Box
    flat: Range | None
    offset: int


def pieces(shard: Shard, start: int, stop: int) -> Iterator[Part]:
    """What the elements ``[start, stop)`` of the flattened local tensor are in the whole one."""
    for first, box in shard.boxes():
        count = size(box)
        low, high = max(start, first), min(stop, first + count)
        if low < high:
            flat = None if high - low == count else (low - first, high - first)
            yield Part(box, flat, low - start)


def whole_shape(named: Named, local_shape: Sequence[int], facts: ModelFacts) -> tuple[int, ...]:
    """The shape of the whole parameter, with the true vocabulary."""
    shape = list(local_shape)
    if named.sharing in ("query", "key_value"):
        shape[0] = _heads(named, facts).rows
    elif named.sharing == "row":
        shape[1] *= facts.tp_size
    elif named.sharing != "replicated":
        shape[0] *= facts.tp_size
    if named.sharing == "vocab" and facts.vocab_size is not None:
        if facts.vocab_size > shape[0]:
            raise ValueError(f"{facts.vocab_size} words are asked of {shape[0]} rows")
        shape[0] = facts.vocab_size
    return tuple(shape)


def shard_of(named: Named, local_shape: Sequence[int], tp_rank: int, facts: ModelFacts) -> Shard:
    """The part that rank ``tp_rank`` holds of a parameter.

    Raises:
        ValueError: The shape does not fit the model.
    """
    shape, local = whole_shape(named, local_shape, facts), tuple(local_shape)
    if named.sharing == "replicated":
        return Shard(shape, local, None)
    if named.sharing == "row":
        start = tp_rank * local[1]
        return Shard(shape, local, 1, ((start, start + local[1]),))
    rows = _row_ranges(named, local[0], tp_rank, facts)
    if named.sharing in ("qkv", "query", "key_value") and facts.heads is not None:
        held = sum(stop - start for start, stop in rows)
        if held != local[0] or _heads(named, facts).rows != shape[0]:
            raise ValueError(f"{local[0]} rows do not hold {_heads(named, facts)}")
    return Shard(shape, local, 0, tuple(rows))


def _row_ranges(named: Named, rows: int, tp_rank: int, facts: ModelFacts) -> list[Range]:
    start = tp_rank * rows
    rank = {"tp_rank": tp_rank, "tp_size": facts.tp_size}
    layout = named.layout or facts.layout
    if named.sharing == "qkv" and (layout != "grouped" or facts.heads is not None):
        return fused_rows(layout, _heads(named, facts), **rank)
    if named.sharing == "query":
        return query_rows(_heads(named, facts), **rank)
    if named.sharing == "key_value":
        return key_value_rows(_heads(named, facts), **rank)
    if named.sharing == "gated" and facts.is_gated:
        # A rank holds its gate rows, then its up rows; the whole has all gate rows first.
        half, whole_half = rows // 2, rows * facts.tp_size // 2
        first = tp_rank * half
        return [(first, first + half), (whole_half + first, whole_half + first + half)]
    if named.sharing == "vocab" and facts.vocab_size is not None:
        return [(min(start, facts.vocab_size), min(start + rows, facts.vocab_size))]
    return [(start, start + rows)]


def _heads(named: Named, facts: ModelFacts) -> Heads:
    if facts.heads is None:
        raise ValueError(f"'{named.name}' needs the number of attention heads, which is not stored")
    return facts.heads


def divide_layers(
    num_layers: int, stages: int, *, sizes: Sequence[int] | None = None
) -> list[range]:
    """The layers of each pipeline stage: contiguous and in order.

    Args:
        num_layers: Layers of the model.
        stages: How many stages there are.
        sizes: Layers of each stage; None lets them differ by at most one, the first ones larger.

    Raises:
        ValueError: A stage would be empty, or the sizes do not sum up.
    """
    if sizes is not None and (sum(sizes) != num_layers or min(sizes) < 1):
        raise ValueError(
            f"stages of {', '.join(map(str, sizes))} layers are not {num_layers} layers with at "
            f"least one each"
        )
    if not 1 <= stages <= num_layers:
        raise ValueError(
            f"{num_layers} layers can't be divided among {stages} pipeline stages, of which each "
            f"needs one"
        )
    quotient, rest = divmod(num_layers, stages)
    bounds = [0]
    for stage in range(stages):
        count = quotient + (stage < rest) if sizes is None else sizes[stage]
        bounds.append(bounds[-1] + count)
    return [range(*pair) for pair in pairwise(bounds)]
