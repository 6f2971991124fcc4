from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mds_core.sharding import ParameterShard, cut, flat_pieces, merge


@st.composite
def shards(draw):
    """All tensor-parallel shards of one parameter, gated or not, with or without padding."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    ranks, blocks, padding = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
        draw(st.integers(0, 2)),
    )
    extent = shape[dim] * ranks * blocks
    whole = (*shape[:dim], extent, *shape[dim + 1 :])
    local = (*shape[:dim], shape[dim] * blocks + padding, *shape[dim + 1 :])
    step = shape[dim]
    return [
        ParameterShard(
            name="w",
            global_shape=whole,
            local_shape=local,
            dim=dim,
            ranges=tuple(
                (block * step * ranks + rank * step, block * step * ranks + (rank + 1) * step)
                for block in range(blocks)
            ),
        )
        for rank in range(ranks)
    ]


def box_slices(box):
    return tuple(slice(low, high) for low, high in box)


@given(shards())
@settings(deadline=None, max_examples=60)
def test_cutting_and_merging_gives_the_parameter_back(parts) -> None:
    whole = torch.arange(math.prod(parts[0].global_shape)).view(parts[0].global_shape)

    assert torch.equal(merge(parts, [cut(part, whole) for part in parts]), whole)


@given(shards(), st.data())
@settings(deadline=None, max_examples=120)
def test_flat_pieces_hold_exactly_the_elements_of_the_range(parts, data) -> None:
    shape = parts[0].global_shape
    whole = torch.arange(1, 1 + math.prod(shape)).view(shape)  # 0 marks padding
    part = data.draw(st.sampled_from(parts))
    flat_local = cut(part, whole).flatten()
    start = data.draw(st.integers(0, flat_local.numel()))
    stop = data.draw(st.integers(start, flat_local.numel()))

    rebuilt = torch.zeros(stop - start, dtype=whole.dtype)
    pieces = flat_pieces(part, start, stop)
    for piece in pieces:
        values = whole[box_slices(piece.box)].flatten()
        if piece.flat is not None:
            values = values[piece.flat[0] : piece.flat[1]]
            assert values.numel() < whole[box_slices(piece.box)].numel()
        assert not rebuilt[piece.offset : piece.offset + values.numel()].any()
        rebuilt[piece.offset : piece.offset + values.numel()] = values

    assert torch.equal(rebuilt, flat_local[start:stop])
    assert len({piece.box for piece in pieces}) == len(pieces)


@given(shards(), st.data())
@settings(deadline=None, max_examples=60)
def test_zero_ranges_of_all_ranks_cover_the_parameter_exactly_once(parts, data) -> None:
    covered = torch.zeros(parts[0].global_shape, dtype=torch.int64)
    for part in parts:
        size = math.prod(part.local_shape)
        cuts = [0, *sorted(data.draw(st.lists(st.integers(0, size), max_size=3))), size]
        for start, stop in itertools.pairwise(cuts):
            for piece in flat_pieces(part, start, stop):
                box = covered[box_slices(piece.box)]
                count = torch.zeros(box.numel(), dtype=torch.int64)
                count[slice(*(piece.flat or (0, box.numel())))] = 1
                box += count.view(box.shape)

    assert torch.equal(covered, torch.ones_like(covered))


def test_a_gated_projection_is_two_boxes_and_a_range_across_them_two_pieces() -> None:
    shard = ParameterShard(
        name="fc1", global_shape=(8, 4), local_shape=(4, 4), dim=0, ranges=((2, 4), (6, 8))
    )

    assert shard.boxes() == (((2, 4), (0, 4)), ((6, 8), (0, 4)))
    first, second = flat_pieces(shard, 6, 16)
    assert (first.box, first.flat, first.offset) == (((2, 4), (0, 4)), (6, 8), 0)
    assert (second.box, second.flat, second.offset) == (((6, 8), (0, 4)), None, 2)


def test_a_replicated_scalar_has_the_empty_box() -> None:
    shard = ParameterShard(name="w", global_shape=(), local_shape=())

    assert shard.boxes() == ((),)
    assert flat_pieces(shard, 0, 1)[0].box == ()


def test_a_rank_with_only_padding_holds_no_box() -> None:
    shard = ParameterShard(name="w", global_shape=(5, 2), local_shape=(8, 2), dim=0, ranges=())

    assert shard.boxes() == ()
    assert flat_pieces(shard, 0, 16) == []
    assert torch.equal(cut(shard, torch.ones(5, 2)), torch.zeros(8, 2))


def test_a_range_outside_the_tensor_is_an_error() -> None:
    shard = ParameterShard(name="w", global_shape=(5,), local_shape=(5,))

    with pytest.raises(ValueError, match=r"\[2, 6\) is not a range of the 5 elements"):
        flat_pieces(shard, 2, 6)


def test_a_shape_that_cannot_hold_the_ranges_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not hold the ranges"):
        ParameterShard(name="w", global_shape=(5,), local_shape=(1,), dim=0, ranges=((0, 2),))


def test_a_rank_is_told_whether_it_holds_all() -> None:
    ranges = ((0, 2), (2, 4))
    gated = ParameterShard(name="w", global_shape=(4,), local_shape=(4,), dim=0, ranges=ranges)
    half = ParameterShard(name="w", global_shape=(4,), local_shape=(2,), dim=0, ranges=((0, 2),))

    assert (gated.whole, half.whole) == (True, False)
    assert ParameterShard(name="w", global_shape=(4,), local_shape=(4,)).whole
