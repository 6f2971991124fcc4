import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mds_data.sampling.permutation import EpochOrder, Permutation


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_every_number_comes_once(size, key):
    numbers = Permutation(size, key=key).many(np.arange(size))
    assert sorted(numbers.tolist()) == list(range(size))


@given(size=st.integers(1, 2**50), key=st.integers(0, 2**64 - 1), place=st.integers(0, 2**50))
@settings(deadline=None)
def test_one_by_one_is_the_same_as_many_at_once(size, key, place):
    permutation = Permutation(size, key=key)
    place %= size
    assert permutation(place) == permutation.many(np.array([place]))[0]
    assert 0 <= permutation(place) < size


def test_it_is_fixed_for_ever():
    """Stored runs rely on the order: it must not change between versions."""
    assert Permutation(10, key=1).many(np.arange(10)).tolist() == [6, 8, 1, 7, 3, 2, 9, 0, 5, 4]


@pytest.mark.parametrize("size", [1000, 4096, 100_000])
def test_neighbours_are_scattered(size):
    numbers = Permutation(size, key=7).many(np.arange(size))
    steps = np.abs(np.diff(numbers))
    assert abs(np.corrcoef(np.arange(size), numbers)[0, 1]) < 0.1
    assert abs(steps.mean() / size - 1 / 3) < 0.03
    halves = np.bincount(numbers[: size // 2] * 16 // size, minlength=16)
    assert np.abs(halves - size / 32).max() < 6 * np.sqrt(size / 64)


def test_keys_give_unlike_orders():
    orders = [Permutation(5000, key=key).many(np.arange(5000)) for key in range(20)]
    for first in range(20):
        for second in range(first):
            assert (orders[first] == orders[second]).sum() < 12


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_goes_on_over_epochs(shuffle):
    order = EpochOrder(100, seed=3, shuffle=shuffle)
    numbers = order.indices(0, 350)
    assert [order.locate(place) for place in range(350)] == [
        (place // 100, number) for place, number in enumerate(numbers.tolist())
    ]
    np.testing.assert_array_equal(order.indices(95, 120), numbers[95:215])
    for epoch in range(3):
        assert sorted(numbers[100 * epoch : 100 * epoch + 100]) == list(range(100))
    assert shuffle == (numbers[:100].tolist() != numbers[100:200].tolist())


@pytest.mark.parametrize("size", [0, -1])
def test_nothing_can_not_be_ordered(size):
    with pytest.raises(ValueError, match="at least one"):
        Permutation(size, key=0)
    with pytest.raises(ValueError, match="at least one"):
        EpochOrder(size, seed=0)
