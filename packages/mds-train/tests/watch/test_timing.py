from __future__ import annotations

from mds_train.watch.timing import PhaseTimer


def test_each_part_gets_the_seconds_until_the_next() -> None:
    now = iter([0.0, 1.0, 1.5, 4.5, 4.5, 10.0, 12.0])
    timer = PhaseTimer(clock=lambda: next(now))

    timer.at("data")
    timer.at("update")
    timer.at("data")
    assert timer.taken() == {"data": 1.0 + 3.0, "update": 0.5}

    assert timer.taken() == {}
    timer.at("data")
    assert timer.taken() == {"data": 2.0}


def test_it_waits_for_the_device_before_it_reads_the_clock() -> None:
    order: list[str] = []
    timer = PhaseTimer(
        settle=lambda: order.append("settle"),
        clock=lambda: (order.append("clock"), 0.0)[1],
    )

    timer.at("update")

    assert order == ["settle", "clock"]
