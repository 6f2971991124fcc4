from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mds_ckpt.tensors.qkv import Heads, detect_layout, fused_rows, key_value_rows, query_rows

heads = st.builds(
    lambda groups, per, channels: Heads(4 * groups * per, 4 * groups, channels),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
)


def taken(rows: list[tuple[int, int]]) -> list[int]:
    return [row for start, stop in rows for row in range(start, stop)]


@given(heads, st.sampled_from([1, 2, 4]), st.sampled_from(["grouped", "thirds"]))
def test_ranks_hold_every_row_once(model: Heads, tp: int, layout: Any) -> None:
    rows = [
        r for rank in range(tp) for r in taken(fused_rows(layout, model, tp_rank=rank, tp_size=tp))
    ]

    assert sorted(rows) == list(range(model.rows))


@given(heads, st.sampled_from([1, 2, 4]))
def test_separate_weights_hold_every_row_once(model: Heads, tp: int) -> None:
    rows = [
        row
        for rank in range(tp)
        for part in (query_rows, key_value_rows)
        for row in taken(part(model, tp_rank=rank, tp_size=tp))
    ]

    assert sorted(rows) == list(range(model.rows))


@pytest.mark.parametrize(
    ("layout", "shape", "order"), [("v0", (3, 4, 2), (1, 0, 2)), ("v1", (4, 2, 3), (0, 2, 1))]
)
def test_old_orders_are_those_of_megatrons_own_transposes(
    layout: Any, shape: Any, order: Any
) -> None:
    model = Heads(4, 4, 2)
    stored = np.arange(model.rows)

    rows = np.array(taken(fused_rows(layout, model, tp_rank=0, tp_size=1)))

    canonical = np.empty_like(stored)
    canonical[rows] = stored
    np.testing.assert_array_equal(canonical, stored.reshape(shape).transpose(order).reshape(-1))


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match="can't be shared by 3"):
        fused_rows("grouped", Heads(4, 4, 2), tp_rank=0, tp_size=3)


@pytest.mark.parametrize(
    ("args", "version", "layout", "certain"),
    [
        ({}, None, "v0", True),
        ({}, 0, "v0", True),
        ({}, 1.0, "v1", True),
        ({}, 3.0, "grouped", True),
        ({"ds_sequence_parallel_fpdt": False}, 3.0, "thirds", True),
        ({"ds_sequence_parallel_fpdt": False, "hf_ckpt_dir": "x"}, 3.0, "grouped", False),
        (
            {
                "ds_sequence_parallel_fpdt": False,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            },
            3.0,
            "grouped",
            False,
        ),
        ({"mds_qkv_layout": "thirds"}, 3.0, "thirds", True),
        (None, 3.0, "grouped", False),
    ],
)
def test_the_layout_is_told_by_version_and_args(
    args: Any, version: Any, layout: str, certain: bool
) -> None:
    verdict = detect_layout(args, version)

    assert (verdict.layout, verdict.is_certain) == (layout, certain)


def test_what_is_asked_for_wins() -> None:
    assert detect_layout({}, 1.0, asked="thirds").layout == "thirds"
