"""The simulator agrees with the published formulas and with the order that really ran."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from pipeline_cells import CELLS

from mds_core.pipeline import SCHEDULES, Times, simulate, to_svg, to_text
from mds_core.pipeline.order import Pass, check_order, order_of
from mds_core.pipeline.simulation import simulate_order

SIZES = [(2, 4), (4, 4), (4, 8), (4, 16), (8, 8), (8, 16), (8, 32)]
TIMES = [(1, 1, 1), (1, 1.2, 0.8), (2, 2, 1), (1, 1.5, 1.5), (1, 1, 0.5), (1, 2, 1)]


def test_the_lazy_zero_bubble_adds_weight_gradients_as_megatron_deepspeed_does() -> None:
    """Its README: the last of 4 ranks updates for micro batches 4 5 6 7 1 2 3 8 of 8."""
    order = order_of(SCHEDULES["zb-h1-lazy"], pp_size=4, micro_batches=8)

    updates = [what.micro_batch + 1 for what in order[3] if what.kind in "WB"]

    assert updates == [4, 5, 6, 7, 1, 2, 3, 8]


@pytest.mark.parametrize(("pp_size", "micro_batches", "bubble"), [(4, 8, 4), (8, 16, 8)])
def test_the_lazy_zero_bubble_leaves_one_pass_more_idle(pp_size, micro_batches, bubble) -> None:
    lazy = simulate("zb-h1-lazy", pp_size=pp_size, micro_batches=micro_batches)
    exact = simulate("zb-h1", pp_size=pp_size, micro_batches=micro_batches)

    assert lazy.bubble == pytest.approx(bubble)
    assert exact.bubble == pytest.approx(bubble - 1)
    assert lazy.peak_activations == (float(pp_size),) * pp_size


def times(values) -> Times:
    forward, input_gradient, weight_gradient = values
    return Times(forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient)


@pytest.mark.parametrize("values", TIMES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubbles_and_memory_are_those_of_the_papers(p, m, values) -> None:
    f, i, w = values

    def result(name, **options):
        return simulate(name, pp_size=p, micro_batches=m, times=times(values), **options)

    gpipe, plain, zero = result("gpipe"), result("1f1b"), result("zb-h1")
    assert gpipe.bubble == pytest.approx((p - 1) * (f + i + w))
    assert gpipe.peak_activations == (m,) * p
    assert plain.bubble == pytest.approx((p - 1) * (f + i + w))
    assert plain.peak_activations == tuple(min(m, p - rank) for rank in range(p))
    assert zero.bubble == pytest.approx((p - 1) * max(f, i, f + i - w))
    assert zero.peak_activations == (min(m, p),) * p
    for v in (2, 4):
        looped = result("interleaved-1f1b", chunks=v)
        assert looped.bubble == pytest.approx((p - 1) * (f + i + w) / v)
        if m > p:
            assert looped.peak_activations[0] == pytest.approx(p * (1 + (p - 1) / (p * v)))


def test_with_equal_times_zb_h1_leaves_a_third_of_the_bubble_and_zb_v_almost_none() -> None:
    plain, zero, v = (
        simulate(name, pp_size=4, micro_batches=8) for name in ("1f1b", "zb-h1", "zb-v")
    )

    assert zero.bubble == pytest.approx(plain.bubble / 3)
    assert max(zero.peak_activations) <= max(plain.peak_activations)
    assert (zero.makespan, v.bubble) == (27, 1.5)
    assert zero.bubble_share == pytest.approx(3 / 27)


def test_transfers_cost_what_they_delay() -> None:
    slow = simulate("1f1b", pp_size=4, micro_batches=8, times=Times(transfer=0.25))

    assert slow.bubble == pytest.approx(13)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_order_is_the_one_that_really_ran(name, two_ranks) -> None:
    micro_batches = CELLS[name].micro_batches

    order = order_of(SCHEDULES[name], pp_size=2, micro_batches=micro_batches)

    ran = {rank: [Pass(*step) for step in two_ranks[rank]["ran"][name]] for rank in range(2)}
    assert ran == {rank: list(passes) for rank, passes in order.items()}


VALID = {
    0: [Pass("F", 0, 0), Pass("F", 0, 1), Pass("B", 0, 0), Pass("B", 0, 1)],
    1: [Pass("F", 1, 0), Pass("I", 1, 0), Pass("F", 1, 1), Pass("W", 1, 0), Pass("B", 1, 1)],
}


def test_a_valid_order_passes_the_check() -> None:
    assert check_order(VALID, stages=2, micro_batches=2) == {0: 0, 1: 1}


@pytest.mark.parametrize(
    ("rank", "passes", "message"),
    [
        (0, [*VALID[0], Pass("F", 0, 0)], "is a repetition"),
        (0, [*VALID[0], Pass("F", 0, 2)], "is outside 2 stages and 2 micro batches"),
        (0, VALID[0][:3], "I of stage 0, micro batch 1 is missing"),
        (0, [Pass("F", 1, 0), *VALID[0]], "the stage stands on rank 0 too"),
        (1, [Pass("I", 1, 0), *VALID[1]], "comes before the F that it needs"),
        (
            1,
            [Pass("F", 1, 1), Pass("B", 1, 1), Pass("F", 1, 0), Pass("B", 1, 0)],
            "must be rising",
        ),
    ],
)
def test_an_invalid_order_is_refused(rank, passes, message) -> None:
    with pytest.raises(ValueError, match=message):
        check_order(VALID | {rank: passes}, stages=2, micro_batches=2)


def test_an_order_that_waits_for_itself_is_refused() -> None:
    waiting = {
        0: [Pass("F", 0, 0), Pass("B", 0, 0), Pass("F", 0, 1), Pass("B", 0, 1)],
        1: [Pass("F", 1, 0), Pass("F", 1, 1), Pass("B", 1, 0), Pass("B", 1, 1)],
    }
    with pytest.raises(ValueError, match=r"never ends: rank 0 at .* wait for each other"):
        simulate_order(waiting, stages=2, micro_batches=2)


def test_a_drawing_shows_every_pass() -> None:
    result = simulate("zb-h1", pp_size=2, micro_batches=2)

    text, svg = to_text(result, width=14), to_svg(result)

    assert text.splitlines()[:2] == [
        "rank   0 FFFF..IIWWIIWW peak 2",
        "rank   1 ..FFIIFFIIWWWW peak 2",
    ]
    assert text.splitlines()[-1].startswith(f"makespan {result.makespan:g}, bubble")
    boxes = ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}g")
    assert len(list(boxes)) == len(result.spans) == 12
