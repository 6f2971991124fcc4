"""Sequences into bins: none lost, none too full, about as few bins as can be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mds_data.sampling.packing import pack


@given(
    lengths=st.lists(st.integers(1, 50), max_size=80),
    capacity=st.integers(50, 90),
    seed=st.integers(0, 5),
)
@settings(max_examples=100, deadline=None)
def test_every_sequence_is_in_one_bin_that_holds_it(lengths, capacity, seed):
    bins = pack(np.array(lengths, np.int64), capacity=capacity, seed=seed)

    assert sorted(number for members in bins for number in members) == list(range(len(lengths)))
    sizes = [sum(lengths[number] for number in members) for members in bins]
    assert all(0 < size <= capacity for size in sizes)
    # best fit leaves no two bins that would have fit into one
    assert all(a + b > capacity for a, b in zip(sorted(sizes), sorted(sizes)[1:2], strict=False))


def test_the_seed_decides_what_is_packed_together():
    lengths = np.full(100, 10)
    assert pack(lengths, capacity=30, seed=1) == pack(lengths, capacity=30, seed=1)
    assert pack(lengths, capacity=30, seed=1) != pack(lengths, capacity=30, seed=2)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="a sequence of 9 does not fit a bin of 8"):
        pack(np.array([3, 9]), capacity=8, seed=0)
