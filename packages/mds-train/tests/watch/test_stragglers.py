from __future__ import annotations

import pytest

from mds_train.watch.stragglers import straggler_sentence, straggler_table


def test_ranks_are_ordered_by_their_own_work() -> None:
    seconds = [
        {"reading of data": 0.1, "forward and backward": 0.9, "update": 5.0},
        {"reading of data": 0.5, "forward and backward": 1.5, "update": 0.1},
        {"reading of data": 0.0, "forward and backward": 1.0, "update": 3.0},
    ]

    rows = straggler_table(seconds, hosts=["a", "b", "c"])

    assert [row.rank for row in rows] == [1, 0, 2]
    assert [row.ratio for row in rows] == pytest.approx([2.0, 1.0, 1.0])
    assert straggler_sentence(rows, steps=10) == (
        "Slowest of 3 ranks over 10 steps: rank 1 (b), 2.00 times the median (reading of data "
        "0.500 s, forward and backward 1.500 s)."
    )


def test_ranks_that_did_nothing_are_equal() -> None:
    assert [row.ratio for row in straggler_table([{}, {}], hosts=["a", "a"])] == [1.0, 1.0]
