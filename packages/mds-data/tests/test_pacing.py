"""Curriculum schedules: their levels say where each difficulty begins."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mds_data import DiscretePacing, RootPacing
from mds_data.sampling.pacing import pacing_from_deepspeed


@given(
    minimum=st.integers(0, 60),
    span=st.integers(0, 200),
    total=st.integers(1, 300),
    step=st.integers(1, 20),
    degree=st.sampled_from([1.0, 2.0, 3.0]),
)
@settings(max_examples=150, deadline=None)
def test_levels_are_where_the_difficulty_grows(minimum, span, total, step, degree):
    pacing = RootPacing(
        minimum=minimum, maximum=minimum + span, total=total, step=step, degree=degree
    )
    levels = pacing.levels()
    last = 4 * total * (step + 1)
    seen = {}
    for progress in range(min(last, 3000)):
        seen.setdefault(pacing.at(progress), progress)
    assert list(seen.items()) == [(d, begin) for d, begin in levels if begin < min(last, 3000)]


def test_a_line_grows_by_steps_to_its_maximum():
    pacing = RootPacing(minimum=64, maximum=1024, total=1000, step=64)
    assert [pacing.at(progress) for progress in (0, 66, 67, 500, 999, 1000, 9000)] == [
        64,
        64,
        128,
        512,
        960,
        1024,
        1024,
    ]


def test_discrete_difficulties_hold_up_to_and_with_their_ends():
    pacing = DiscretePacing(difficulties=(1, 2, 3), ends=(5, 10))
    assert [pacing.at(progress) for progress in (0, 5, 6, 10, 11, 99)] == [1, 1, 2, 2, 3, 3]
    assert pacing.levels() == [(1, 0), (2, 6), (3, 11)]
    assert DiscretePacing.constant(7).levels() == [(7, 0)]


def test_deepspeed_s_configuration_in_samples():
    config = {
        "min_difficulty": 8,
        "max_difficulty": 64,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 8},
    }
    steps, samples = pacing_from_deepspeed(config), pacing_from_deepspeed(config, unit=16)
    assert all(steps.at(step) == samples.at(16 * step) for step in range(150))
    discrete = {
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [1, 2], "max_step": [5]},
    }
    steps, samples = pacing_from_deepspeed(discrete), pacing_from_deepspeed(discrete, unit=16)
    assert all(steps.at(n // 16) == samples.at(n) for n in range(200))
    with pytest.raises(ValueError, match="lacks 'min_difficulty'"):
        pacing_from_deepspeed({k: v for k, v in config.items() if k != "min_difficulty"})
    with pytest.raises(ValueError, match="'custom' is none of"):
        pacing_from_deepspeed({"schedule_type": "custom", "schedule_config": {}})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"minimum": 9, "maximum": 8}, "must lie from 0 to maximum"),
        ({"minimum": 0, "maximum": 8, "total": 0}, "must be at least 1"),
        ({"minimum": 0, "maximum": 10**6, "step": 1}, "make the step larger"),
    ],
)
def test_schedules_that_can_t_be_are_named(options, reason):
    with pytest.raises(ValueError, match=reason):
        RootPacing(**{"total": 10, **options})
    with pytest.raises(ValueError, match="need one end less"):
        DiscretePacing(difficulties=(1, 2), ends=())
    with pytest.raises(ValueError, match="must not fall"):
        DiscretePacing(difficulties=(2, 1), ends=(4,))
