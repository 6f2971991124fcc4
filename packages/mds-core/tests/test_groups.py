from __future__ import annotations

import pytest
import torch
from group_reports import OPTIONS, WANTED
from hypothesis import given
from hypothesis import strategies as st

from mds_core import collectives
from mds_core.groups import Layout, ProcessGroups, group_rank, group_size
from mds_core.parameter import split_evenly

SIZES = st.integers(1, 3)


@given(SIZES, SIZES, SIZES, SIZES)
def test_ranks_count_tp_fastest_then_ulysses_dp_pp(tp, ulysses, dp, pp) -> None:
    layout = Layout(tp_size=tp, ulysses_size=ulysses, dp_size=dp, pp_size=pp)

    places = [layout.coordinates(rank) for rank in range(layout.world_size)]

    assert layout.world_size == tp * ulysses * dp * pp
    assert [((c.pp * dp + c.dp) * ulysses + c.ulysses) * tp + c.tp for c in places] == list(
        range(layout.world_size)
    )
    assert len(set(places)) == layout.world_size


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp_size": 0}, r"tp_size \(0\) must be at least 1"),
        ({"dp_size": 3, "ep_size": 2}, r"dp_size \(3\) is not a multiple of ep_size \(2\)"),
    ],
)
def test_an_impossible_layout_is_refused(sizes, message) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(**sizes)


def test_a_rank_outside_the_layout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank \(2\) is outside this layout of 2 ranks"):
        Layout(tp_size=2).coordinates(2)


def test_one_process_needs_no_torch_distributed() -> None:
    groups = ProcessGroups.build(Layout())

    assert groups == ProcessGroups.single()
    assert (groups.tp, groups.dp_ulysses, groups.embedding) == (None, None, None)
    assert (groups.tp_rank, groups.pp_size, groups.ep_rank) == (0, 1, 0)
    assert (group_size(None), group_rank(None)) == (1, 0)


def test_a_layout_of_another_size_than_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs 4 processes \(tp 2 x ulysses 1 x dp 2 x pp 1\)"):
        ProcessGroups.build(Layout(tp_size=2, dp_size=2))


def test_groups_and_collectives_on_four_ranks(four_ranks) -> None:
    reports = four_ranks
    first = [report["tp2dp2"] for report in reports]
    assert [r["tp"] for r in first] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [r["dp"] for r in first] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [r["ep"] for r in first] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(r["expert_dp"] is None and r["pp"] is None for r in first)
    assert [r["model"] for r in first] == [r["tp"] for r in first]
    second = [report["tp2pp2"] for report in reports]
    assert [r["pp"] for r in second] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [r["embedding"] for r in second] == [r["pp"] for r in second]
    assert [r["model"] for r in second] == [[0, 1, 2, 3]] * 4
    third = [report["pp4"] for report in reports]
    assert [r["embedding"] for r in third] == [[0, 3], None, None, [0, 3]]
    fourth = [report["ulysses2dp2"] for report in reports]
    assert [r["ulysses"] for r in fourth] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [r["dp_ulysses"] for r in fourth] == [[0, 1, 2, 3]] * 4
    assert [r["expert_dp_ulysses"] for r in fourth] == [[0, 1, 2, 3]] * 4
    fifth = [report["ulysses2ep2"] for report in reports]
    assert [r["ep"] for r in fifth] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [r["expert_dp_ulysses"] for r in fifth] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    for name, (forward, gradient) in WANTED.items():
        for rank, report in enumerate(reports):
            assert torch.equal(report[name][0], forward(rank)), f"{name} on rank {rank}"
            assert torch.equal(report[name][1], gradient(rank)), f"backward of {name}"
    for rank, report in enumerate(reports):
        rows, gradient = report["rows"]
        wanted = [(r, rank, place) for r in range(4) for place in range(r + rank)]
        assert rows.tolist() == [list(map(float, row)) for row in wanted]
        receivers = [to for to in range(4) for _ in range(rank + to)]
        assert gradient[:, 0].tolist() == [to + 1.0 for to in receivers]
    assert all("does not divide into 4 equal slices" in r["uneven"] for r in reports)


@pytest.mark.parametrize("name", WANTED)
def test_a_group_of_one_communicates_nothing(name) -> None:
    x = torch.ones(2, 3)
    options = OPTIONS.get(name, {"dim": 1})

    assert getattr(collectives, name)(x, group=None, **options) is x


def test_slices_of_blocks_follow_each_other_by_rank() -> None:
    assert split_evenly(8, rank=1, size=2, blocks=2) == ((2, 4), (6, 8))
    with pytest.raises(ValueError, match="an extent of 6 does not divide into 2 tensor-parallel"):
        split_evenly(6, rank=0, size=2, blocks=2)
