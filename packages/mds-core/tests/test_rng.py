from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mds_core.rng import DropoutKey, dropout, keep_mask

KEY = DropoutKey(seed=3, samples=torch.tensor([7, 2**33 + 1, 9]))
HEADS, ROWS, COLUMNS = 4, 6, 37


def mask(key=KEY, *, probability=0.3, layer=2, site="attention", **ranges):
    whole = {"heads": range(HEADS), "rows": range(ROWS), "columns": range(COLUMNS)}
    return keep_mask(key, layer=layer, site=site, probability=probability, **whole | ranges)


def ranges_within(extent: int):
    bounds = st.tuples(st.integers(0, extent), st.integers(0, extent))
    return bounds.map(lambda pair: range(min(pair), max(pair)))


@given(ranges_within(HEADS), ranges_within(ROWS), ranges_within(COLUMNS))
@settings(deadline=None, max_examples=60)
def test_a_slice_of_the_mask_is_the_mask_of_the_slice(heads, rows, columns) -> None:
    part = mask(heads=heads, rows=rows, columns=columns)

    assert torch.equal(
        part,
        mask()[
            :,
            heads.start : heads.stop,
            rows.start : rows.stop,
            columns.start : columns.stop,
        ],
    )


def test_a_mask_does_not_depend_on_the_batch_a_sample_is_in() -> None:
    alone = DropoutKey(seed=3, samples=torch.tensor([2**33 + 1]))

    assert torch.equal(mask(alone), mask()[1:2])


@pytest.mark.parametrize(
    "other",
    [
        {"layer": 3},
        {"site": "mlp_output"},
        {"key": DropoutKey(seed=4, samples=KEY.samples)},
        {"key": DropoutKey(seed=3, samples=KEY.samples + 1)},
        {"key": DropoutKey(seed=3, samples=KEY.samples + 2**32)},
    ],
)
def test_seed_sample_layer_and_site_each_select_another_mask(other) -> None:
    agreement = (mask() == mask(**other)).double().mean()

    assert 0.45 < agreement < 0.7  # 0.58 for independent masks


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_the_share_of_dropped_values_is_the_probability(probability) -> None:
    keep = mask(probability=probability, columns=range(5000), rows=range(8))

    assert (~keep).double().mean().item() == pytest.approx(probability, abs=3e-3)


def test_heads_rows_and_neighbours_are_independent() -> None:
    keep = mask(probability=0.5, columns=range(4096), rows=range(8)).double() - 0.5

    for dim in (0, 1, 2, 3):
        size = keep.size(dim)
        product = keep.narrow(dim, 1, size - 1) * keep.narrow(dim, 0, size - 1)
        assert abs(product.mean()) < 4 * 0.25 / product.numel() ** 0.5


def test_dropout_keeps_the_expectation() -> None:
    keep = mask(probability=0.25, columns=range(5000))
    x = torch.ones(keep.shape, dtype=torch.float64)

    y = dropout(x, keep, probability=0.25)

    assert y.mean().item() == pytest.approx(1.0, abs=0.01)
    assert torch.equal(y == 0, ~keep)
    assert y.max().item() == pytest.approx(4 / 3)
