from __future__ import annotations

import os
import signal

import pytest
import torch

from mds_train.interruption import SIGNALS, Interruption


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_kills_nothing(number: signal.Signals) -> None:
    with Interruption(device=torch.device("cpu")) as interruption:
        assert interruption.agreed() is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)

        assert interruption.agreed() == number.name


def test_the_first_signal_counts_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)

    with Interruption(device=torch.device("cpu")) as interruption:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert interruption.agreed() == "SIGTERM"

    assert signal.getsignal(signal.SIGTERM) is before
