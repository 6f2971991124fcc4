"""Boxes and flat ranges, against numpy on small arrays."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mds_ckpt.tensors import box

shapes = st.lists(st.integers(1, 4), min_size=0, max_size=4).map(tuple)


@given(shapes, st.data())
def test_the_parts_of_a_flat_range_are_its_elements_in_order(shape, data):
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    numbers = np.arange(total).reshape(shape)

    parts = box.split_flat(box.whole(shape), start, stop)

    found = [numbers[box.relative(part, box.whole(shape))].reshape(-1) for part in parts]
    assert np.array_equal(np.concatenate([np.empty(0, int), *found]), np.arange(start, stop))
    assert len(parts) <= max(1, 2 * len(shape) - 1)


@given(shapes, st.lists(st.integers(0, 256), max_size=6))
def test_flat_cuts_at_any_places_cover_a_tensor_exactly_once(shape, cuts):
    total = math.prod(shape)
    edges = sorted({0, total, *(cut % (total + 1) for cut in cuts)})
    pieces = [(box.whole(shape), (a, b)) for a, b in pairwise(edges)]

    assert box.coverage_fault(shape, pieces) is None
    if len(pieces) > 1:
        assert box.coverage_fault(shape, pieces[1:]) is not None
        assert "overlap" in str(box.coverage_fault(shape, [*pieces, pieces[0]]))


@given(shapes, st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=5))
def test_repeated_halvings_never_overlap(shape, halvings):
    boxes = [box.whole(shape)]
    for dim, place in halvings:
        if dim >= len(shape):
            continue
        target = boxes.pop(0)
        start, stop = target[dim]
        middle = min(stop, start + place)
        parts = ((start, middle), (middle, stop))
        boxes += [(*target[:dim], part, *target[dim + 1 :]) for part in parts]

    assert box.find_overlap(boxes) is None
    assert box.coverage_fault(shape, [(each, None) for each in boxes]) is None


def test_a_pinwheel_that_no_straight_cut_separates_is_checked_too():
    wheel = [
        ((0, 1), (0, 2)),
        ((0, 2), (2, 3)),
        ((2, 3), (1, 3)),
        ((1, 3), (0, 1)),
        ((1, 2), (1, 2)),
    ]

    assert box.coverage_fault((3, 3), [(each, None) for each in wheel]) is None
    wheel[-1] = ((1, 2), (0, 1))
    assert "overlap" in str(box.coverage_fault((3, 3), [(each, None) for each in wheel]))


@pytest.mark.timeout(20)
def test_many_pieces_are_checked_in_little_time():
    rows = [((i, i + 1), (j, j + 1)) for i in range(200) for j in range(100)]

    assert box.coverage_fault((200, 100), [(each, None) for each in rows]) is None


def test_a_tangle_made_to_take_for_ever_is_refused():
    wheels = [((0, 8000), (i, i + 2)) for i in range(8000)]

    with pytest.raises(ValueError, match="too tangled"):
        box.coverage_fault((8000, 8001), [(each, None) for each in wheels])


def test_pieces_outside_the_tensor_are_named():
    assert "outside the shape" in str(box.coverage_fault((4,), [(((0, 5),), None)]))
    assert "outside its box" in str(box.coverage_fault((4,), [(((0, 4),), (0, 5))]))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=3), st.integers(1, 20))
def test_row_blocks_are_the_box_in_order(sides, most):
    wanted = tuple((start, start + extent) for start, extent in sides)
    shape = tuple(stop for _, stop in wanted)
    numbers = np.arange(math.prod(shape)).reshape(shape)

    def elements(part):
        return numbers[box.relative(part, box.whole(shape))].reshape(-1)

    blocks = list(box.row_blocks(wanted, most))

    assert all(box.size(block) <= most for block in blocks)
    assert np.array_equal(np.concatenate(list(map(elements, blocks))), elements(wanted))
