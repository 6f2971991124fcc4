"""Boxes of a global tensor and flat ranges inside them: pure arithmetic on ints.

A *box* holds one half-open range for each dimension. A *flat* range ``[start, stop)`` counts a
box's elements in row-major order; it is the same as a few smaller boxes, which is how everything
here treats it. A scalar has the empty box, with one element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Box = tuple[tuple[int, int], ...]
Range = tuple[int, int]


def whole(shape: Sequence[int]) -> Box:
    """The box that is a whole tensor of ``shape``."""
    return tuple((0, extent) for extent in shape)


def extents(box: Box) -> tuple[int, ...]:
    """The shape of the elements in ``box``."""
    return tuple([stop - start for start, stop in box])


def size(box: Box) -> int:
    """Number of elements in ``box``."""
    count = 1
    for start, stop in box:  # asked for every piece of every tensor, so without a list
        count *= stop - start
    return count


def is_inside(box: Box, shape: Sequence[int]) -> bool:
    """Whether ``box`` has the rank of ``shape`` and lies within it."""
    return len(box) == len(shape) and all(
        0 <= start <= stop <= extent for (start, stop), extent in zip(box, shape, strict=True)
    )


def intersect(first: Box, second: Box) -> Box | None:
    """The elements common to two boxes of one rank; None if there are none."""
    common = []
    for (a, b), (c, d) in zip(first, second, strict=True):
        start, stop = max(a, c), min(b, d)
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def relative(box: Box, origin: Box) -> tuple[slice, ...]:
    """Slices that pick ``box`` out of an array holding ``origin``."""
    return tuple(
        slice(start - base, stop - base)
        for (start, stop), (base, _) in zip(box, origin, strict=True)
    )


def split_flat(box: Box, start: int, stop: int) -> list[Box]:
    """The boxes that elements ``[start, stop)`` of ``box`` are, in row-major order.

    At most ``2 * rank - 1`` boxes: a beginning, a middle of whole rows, an end. Each is contiguous
    in the flat order, so the k-th begins where the sizes of those before it end.
    """
    return [part for part in _split(box, start, stop) if size(part)]


def _split(box: Box, start: int, stop: int) -> Iterator[Box]:
    if start >= stop:
        return
    if not box or (start == 0 and stop == size(box)):
        yield box
        return
    (low, _), rest = box[0], box[1:]
    row = size(rest)
    first, skip = divmod(start, row)
    last, left = divmod(stop, row)
    if first == last:
        yield from _rows(low + first, rest, skip, left)
        return
    if skip:
        yield from _rows(low + first, rest, skip, row)
        first += 1
    if first < last:
        yield ((low + first, low + last), *rest)
    if left:
        yield from _rows(low + last, rest, 0, left)


def _rows(row: int, rest: Box, start: int, stop: int) -> Iterator[Box]:
    for part in _split(rest, start, stop):
        yield ((row, row + 1), *part)


MOST_STEPS = 20_000_000
"""Comparisons that a check for overlap may take; a layout that needs more is refused."""


def row_blocks(box: Box, most: int) -> Iterator[Box]:
    """``box`` cut into consecutive boxes of at most ``most`` elements, in row-major order.

    >>> list(row_blocks(((0, 3), (2, 4)), 4))
    [((0, 2), (2, 4)), ((2, 3), (2, 4))]
    """
    if size(box) <= most or not box:
        yield box
        return
    row = size(box[1:])
    start, stop = box[0]
    if row > most:
        for index in range(start, stop):
            yield from (((index, index + 1), *rest) for rest in row_blocks(box[1:], most))
        return
    step = max(1, most // row)
    for first in range(start, stop, step):
        yield ((first, min(first + step, stop)), *box[1:])


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Indices of two boxes that share an element, or None.

    Boxes are separated along one dimension after the other, so a tensor cut into n pieces by rows,
    columns and flat ranges takes about n log n steps. Only boxes that no straight cut separates
    are compared pair by pair.
    """
    waiting = [[(i, box) for i, box in enumerate(boxes) if size(box)]]
    steps = 0
    while waiting:
        items = waiting.pop()
        if len(items) < 2:
            continue
        groups = _separated(items)
        steps += len(items) if groups else len(items) ** 2
        if steps > MOST_STEPS:
            raise ValueError(f"{len(boxes)} pieces lie in too tangled a way to be checked")
        if groups:
            waiting.extend(groups)
        elif (pair := _overlapping_pair(items)) is not None:
            return pair
    return None


def _separated(items: list[tuple[int, Box]]) -> list[list[tuple[int, Box]]]:
    """Groups of boxes that a straight cut separates; none if there is no such cut."""
    for dim in range(len(items[0][1])):
        groups: list[list[tuple[int, Box]]] = []
        reach = 0
        for item in sorted(items, key=lambda item: item[1][dim][0]):
            start, stop = item[1][dim]
            if not groups or start >= reach:
                groups.append([])
            groups[-1].append(item)
            reach = max(reach, stop)
        if len(groups) > 1:
            return groups
    return []


def _overlapping_pair(items: list[tuple[int, Box]]) -> tuple[int, int] | None:
    for at, (i, first) in enumerate(items):
        for j, second in items[at + 1 :]:
            if intersect(first, second) is not None:
                return i, j
    return None


def coverage_fault(shape: Sequence[int], pieces: Sequence[tuple[Box, Range | None]]) -> str | None:
    """Why ``pieces`` don't cover a tensor of ``shape`` exactly once; None if they do.

    By counting and by intersection: pieces inside the tensor, as many elements as it has, and no
    two pieces sharing one, leave no element uncovered.
    """
    boxes: list[Box] = []
    for box, flat in pieces:
        if not is_inside(box, shape):
            return f"piece {box} lies outside the shape {list(shape)}"
        if flat is None:
            boxes.append(box)
        elif not 0 <= flat[0] <= flat[1] <= size(box):
            return f"flat range {list(flat)} lies outside its box {box}"
        else:
            boxes.extend(split_flat(box, *flat))
    return _count_fault(shape, boxes)


def _count_fault(shape: Sequence[int], boxes: list[Box]) -> str | None:
    overlap = find_overlap(boxes)
    if overlap is not None:
        first, second = (boxes[i] for i in overlap)
        return f"pieces {first} and {second} overlap"
    covered, total = sum(map(size, boxes)), math.prod(shape)
    if covered != total:
        return f"pieces cover {covered} of {total} elements"
    return None
