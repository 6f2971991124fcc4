from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from mds_train.interruption import SIGNALS, Interruption, Limits

CPU = torch.device("cpu")


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_end_is_noted_and_kills_nothing(number: signal.Signals) -> None:
    with Interruption(device=CPU) as interruption:
        assert interruption.agreed().end is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)

        assert interruption.agreed().end == number.name
        assert interruption.agreed().end == number.name


def test_the_first_signal_counts_and_handlers_come_back() -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}

    with Interruption(device=CPU) as interruption:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption.agreed().end == "SIGTERM"

    assert {number: signal.getsignal(number) for number in SIGNALS} == before


def test_usr1_asks_for_one_save_and_the_run_goes_on() -> None:
    with Interruption(device=CPU) as interruption:
        os.kill(os.getpid(), signal.SIGUSR1)

        found = interruption.agreed()
        assert (found.end, found.save) == (None, "SIGUSR1")
        assert interruption.agreed().save is None


def test_the_third_keystroke_ends_at_once() -> None:
    with Interruption(device=CPU):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_kill_switch_ends_the_run(tmp_path: Path) -> None:
    interruption = Interruption(device=CPU, limits=Limits(kill_switch=tmp_path / "stop"))

    assert interruption.agreed().end is None
    (tmp_path / "stop").touch()
    assert interruption.agreed().end == "kill-switch"


def test_a_time_limit_ends_the_run() -> None:
    clock = Clock()
    interruption = Interruption(device=CPU, limits=Limits(exit_minutes=2.0), clock=clock)

    clock.now = 119.0
    assert interruption.agreed().end is None
    clock.now = 120.0
    assert interruption.agreed().end == "time-limit"


def test_minutes_between_saves_are_counted_from_the_last_save() -> None:
    clock = Clock()
    interruption = Interruption(device=CPU, limits=Limits(save_minutes=1.0), clock=clock)

    clock.now = 61.0
    assert interruption.agreed().save == "minutes"
    interruption.note_save()
    clock.now = 120.0
    assert interruption.agreed().save is None
    clock.now = 121.0
    assert interruption.agreed().save == "minutes"


def test_the_ranks_are_told_when_work_is_unfinished() -> None:
    interruption = Interruption(device=CPU)

    assert interruption.agreed().work_is_done
    assert not interruption.agreed(working=True).work_is_done
