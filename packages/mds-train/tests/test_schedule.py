from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from pathlib import Path

import pytest
from engine_cases import tiny_config

from mds_train.config import ScheduleConfig
from mds_train.config.batch_growth import BatchSizes
from mds_train.schedule import Schedule
from mds_train.state import TrainState


def schedule(**changes: object) -> Schedule:
    base = Schedule(
        kind="cosine",
        max_lr=1e-3,
        min_lr=1e-4,
        warmup_steps=10,
        warmup_init=0.0,
        decay_steps=200,
        wsd_decay_steps=None,
        wsd_decay_style="linear",
        start_weight_decay=0.1,
        end_weight_decay=0.1,
        weight_decay_style="linear",
    )
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize(
    ("updates", "rate"),
    [
        (0, 0.0),
        (1, 1.4999999999999999e-05),
        (10, 0.00015),
        (20, 0.0003),
        (21, 0.0002999993063330627),
        (265, 0.0002604594154601839),
        (510, 0.00016499999999999997),
        (755, 6.954058453981609e-05),
        (999, 3.0000693666937266e-05),
        (1000, 3e-05),
    ],
)
def test_the_rate_follows_updates_and_nothing_else(updates: int, rate: float) -> None:
    """Published values of a run whose curve once changed with gradient accumulation."""
    course = schedule(max_lr=3e-4, min_lr=3e-5, warmup_steps=20, decay_steps=1000)

    assert course.learning_rate(updates) == pytest.approx(rate, rel=1e-9)


@pytest.mark.parametrize(
    ("updates", "rate"),
    [
        (1, 0.0001),
        (10, 0.001),
        (59, 0.0008602090341033546),
        (60, 0.0008547767072315835),
        (61, 0.0008492610574512317),
        (150, 0.0002452232927684166),
        (200, 0.0001),
        (300, 0.0001),
    ],
)
def test_cosine_with_warm_up_has_the_published_values(updates: int, rate: float) -> None:
    assert schedule().learning_rate(updates) == pytest.approx(rate, rel=1e-9)


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        (
            {"max_lr": 5e-4, "min_lr": 5e-5},
            {61: 0.00042463052872561587, 150: 0.0001226116463842083, 200: 5e-05},
        ),
        (
            {"decay_steps": 400},
            {61: 0.0009625564878924622, 150: 0.0007429116526313744, 400: 0.0001},
        ),
    ],
)
def test_another_schedule_starts_at_the_old_progress(
    changes: dict[str, float], rates: dict[int, float]
) -> None:
    other = schedule(**changes)

    assert {k: other.learning_rate(k) for k in rates} == pytest.approx(rates, rel=1e-9)


def test_constant_stays_after_the_warm_up() -> None:
    course = schedule(kind="constant")

    assert [course.learning_rate(k) for k in (5, 10, 1000)] == [5e-4, 1e-3, 1e-3]


def test_linear_falls_evenly_to_the_minimum() -> None:
    course = schedule(kind="linear")

    assert course.learning_rate(105) == pytest.approx((1e-3 + 1e-4) / 2)
    assert course.learning_rate(200) == pytest.approx(1e-4)


def test_inverse_square_root_halves_when_the_updates_quadruple() -> None:
    course = schedule(kind="inverse-square-root")

    assert course.learning_rate(40) == pytest.approx(course.learning_rate(10) / 2)
    assert course.learning_rate(10**9) == 1e-4


@pytest.mark.parametrize("style", ["linear", "cosine", "exponential", "minus-sqrt"])
def test_wsd_stays_and_then_falls(style: str) -> None:
    course = schedule(kind="wsd", wsd_decay_steps=50, wsd_decay_style=style)

    rates = [course.learning_rate(k) for k in range(150, 201)]

    assert course.learning_rate(100) == course.learning_rate(150) == 1e-3
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(1e-4)


def test_weight_decay_can_ramp() -> None:
    linear = schedule(end_weight_decay=0.3)
    cosine = schedule(end_weight_decay=0.3, weight_decay_style="cosine")

    assert linear.weight_decay(50) == pytest.approx(0.15)
    assert cosine.weight_decay(50) == pytest.approx(0.1 + 0.1 * (1 - math.cos(math.pi / 4)))
    assert linear.weight_decay(500) == cosine.weight_decay(500) == pytest.approx(0.3)


def test_the_schedule_ends_with_the_training_unless_it_says_otherwise(tmp_path: Path) -> None:
    follows = Schedule.from_config(tiny_config(tmp_path, train={"train_steps": 9}))
    own = Schedule.from_config(tiny_config(tmp_path, schedule={"decay_steps": 4}))

    assert (follows.decay_steps, own.decay_steps) == (9, 4)


def test_differences_from_a_saved_schedule_are_named() -> None:
    saved = dataclasses.asdict(schedule())

    assert schedule().differences(saved) == []
    assert schedule(max_lr=5e-4).differences(saved) == ["max_lr 0.001 -> 0.0005"]


def megatrons_rate(samples: int, *, warmup: int, decay: int, max_lr: float, min_lr: float) -> float:
    """The cosine of Megatron's OptimizerParamScheduler, written anew from its description."""
    if samples <= warmup:
        return max_lr * samples / warmup
    share = min((samples - warmup) / (decay - warmup), 1.0)
    return min_lr + (max_lr - min_lr) * (math.cos(math.pi * share) + 1.0) / 2.0


def test_by_samples_a_growing_batch_moves_it_as_in_megatron(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path,
        train={"train_steps": 12, "global_batch_size": 8, "rampup_batch_size": (2, 2, 12)},
        schedule={"by_samples": True, "warmup_steps": 3, "decay_steps": 12},
    )
    course, sizes = Schedule.from_config(config), BatchSizes.from_config(config.train)
    warmup, decay = sizes.consumed_after(3), sizes.consumed_after(12)

    consumed = 0
    for step in range(14):
        state = TrainState(iteration=step, consumed_samples=consumed, applied_updates=step)
        assert course.learning_rate(course.place(state)) == pytest.approx(
            megatrons_rate(consumed, warmup=warmup, decay=decay, max_lr=1e-2, min_lr=1e-3)
        )
        consumed += sizes.at(consumed)
    by_updates = Schedule.from_config(replace(config, schedule=ScheduleConfig(warmup_steps=3)))
    assert by_updates.place(TrainState(consumed_samples=9, applied_updates=2)) == 2
    assert (warmup, by_updates.warmup_steps) == (2 + 2 + 4, 3)


def test_by_samples_the_last_part_of_wsd_is_counted_in_samples(tmp_path: Path) -> None:
    wsd = {"kind": "wsd", "wsd_decay_steps": 2, "warmup_steps": 0, "by_samples": True}
    course = Schedule.from_config(tiny_config(tmp_path, schedule=wsd))

    assert (course.decay_steps, course.wsd_decay_steps) == (6 * 8, 2 * 8)
    assert course.learning_rate(4 * 8) == pytest.approx(course.max_lr)
    assert course.learning_rate(6 * 8) == pytest.approx(course.min_lr)
