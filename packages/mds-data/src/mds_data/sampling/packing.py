"""Put sequences of unlike length into bins of one length. Pure arithmetic, no data."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack"]


def pack(lengths: NDArray[np.int64], *, capacity: int, seed: int) -> list[list[int]]:
    """Best fit, longest first: each sequence goes where the least room is left over.

    Sequences of equal length come in an order that the seed chooses, so other seeds put other
    sequences together. Takes time in proportion to the sequences, not to the bins.

    Args:
        lengths: [n] of each sequence, each at most ``capacity``.
        capacity: Of a bin.
        seed: Chooses among equals.

    Returns:
        The numbers of the sequences in each bin.
    """
    if len(lengths) and int(lengths.max()) > capacity:
        raise ValueError(f"a sequence of {int(lengths.max())} does not fit a bin of {capacity}")
    order = np.random.default_rng(seed).permutation(len(lengths))
    order = order[np.argsort(-lengths[order], kind="stable")]
    return _best_fit(order.tolist(), lengths[order].tolist(), capacity=capacity)


def _best_fit(order: Sequence[int], lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set where a bin has room r
    for number, length in zip(order, lengths, strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(number)
        left = room - length
        if left:
            by_room[left].append(chosen)
            rooms |= 1 << left
    return bins
