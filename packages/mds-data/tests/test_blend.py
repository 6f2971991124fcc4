import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mds_data.sampling.blend import balanced_blend, megatron_blend, megatron_counts, shares


def largest_distance(sources, weights):
    """How far any source is from its share at any prefix."""
    wanted = np.array([float(share) for share in shares(weights)])
    taken = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    return np.abs(taken - wanted * np.arange(1, len(sources) + 1)[:, None]).max()


@given(weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=9).filter(lambda w: sum(w) > 1e-3))
@settings(max_examples=150, deadline=None)
def test_every_source_stays_within_one_of_its_share(weights):
    sources, numbers = balanced_blend(weights, count=500).arrays(500)

    assert largest_distance(sources, weights) < 1
    for source in range(len(weights)):
        chosen = numbers[sources == source]
        np.testing.assert_array_equal(chosen, np.arange(len(chosen)))
    assert all(weights[source] > 0 for source in np.unique(sources))


@pytest.mark.parametrize(
    "weights", [[10, 20], [1, 2], [0.3333, 0.6667], [0.001, 0.999], [0.0001, 0.9999], [1, 1]]
)
def test_two_sources_stay_within_a_half(weights):
    sources, _ = balanced_blend(weights, count=1000).arrays(1000)
    assert largest_distance(sources, weights) <= 0.5


def test_places_are_located_one_by_one_as_all_at_once():
    blend = balanced_blend([0.2, 0.3, 0.5], count=10_000)
    sources, numbers = blend.arrays(10_000)
    for place in range(0, 10_000, 13):
        assert blend.locate(place) == (sources[place], numbers[place])


def test_a_period_is_computed_once():
    assert balanced_blend([1, 2, 7], count=10**9).locate(10**9 - 1)[1] > 10**8 - 2


def plain_greedy(weights, count):
    """The original's loop with its names left out."""
    total = 0.0
    for weight in weights:
        total += weight
    normal = np.array([weight / total for weight in weights])
    normal = normal / np.sum(normal)
    taken = [0] * len(weights)
    rows = []
    for place in range(count):
        errors = [float(normal[i]) * max(float(place), 1.0) - taken[i] for i in range(len(weights))]
        best = 0
        for i in range(1, len(weights)):
            if errors[i] > errors[best]:
                best = i
        rows.append((best, taken[best]))
        taken[best] += 1
    return rows


@given(weights=st.lists(st.floats(0.001, 1000), min_size=1, max_size=25), count=st.integers(0, 300))
@settings(max_examples=60, deadline=None)
def test_the_original_s_order_is_its_loop(weights, count):
    sources, numbers = megatron_blend(weights, count=count)
    assert list(zip(sources.tolist(), numbers.tolist(), strict=True)) == plain_greedy(
        weights, count
    )


@pytest.mark.parametrize(
    "weights",
    [[0.3, 0.7], [1, 2, 3, 4], [1, 1], [0.1] * 10, [123, 456, 789], [2**0.5, 1.0], [1] * 20],
)
def test_blocks_of_the_original_s_order_are_its_loop(monkeypatch, weights):
    monkeypatch.setattr("mds_data.sampling.blend._LEARNED", 64)
    monkeypatch.setattr("mds_data.sampling.blend._BLOCK", 300)
    sources, numbers = megatron_blend(weights, count=4000)
    assert list(zip(sources.tolist(), numbers.tolist(), strict=True)) == plain_greedy(weights, 4000)


def test_the_original_asks_for_half_a_percent_more():
    assert megatron_counts([1, 3], num_samples=1000) == [
        math.ceil(1000 * 0.25 * 1.005),
        math.ceil(1000 * 0.75 * 1.005),
    ]


@pytest.mark.parametrize("weights", [[1, -1], [float("nan"), 1], [float("inf"), 1], [0, 0], []])
@pytest.mark.parametrize("order", [balanced_blend, megatron_blend])
def test_what_is_no_weight_is_refused(order, weights):
    with pytest.raises(ValueError, match="weight"):
        order(weights, count=5)
