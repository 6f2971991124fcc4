from __future__ import annotations

import math

from mds_train.saving.spikes import SpikeDetector


def test_a_loss_far_above_the_median_of_the_last_steps_is_a_spike() -> None:
    detector = SpikeDetector(2.0, window=4)

    found = [detector.is_spike(loss) for loss in (4.0, 3.0, 2.0, 2.0, 4.9, 5.1, 2.0)]

    # The median of 4, 3, 2, 2 is 2.5; once the window has moved on it is 2.
    assert found == [False, False, False, False, False, True, False]


def test_nothing_is_a_spike_before_the_window_is_full_or_without_a_factor() -> None:
    assert not any(SpikeDetector(2.0, window=4).is_spike(loss) for loss in (1.0, 1.0, 1.0))
    without = SpikeDetector(None, window=2)
    assert not any(without.is_spike(loss) for loss in (1.0, 1.0, 100.0))


def test_a_loss_that_is_no_number_is_no_spike_and_spoils_no_median() -> None:
    detector = SpikeDetector(2.0, window=2)

    found = [detector.is_spike(loss) for loss in (1.0, math.nan, 1.0, math.inf, 3.0)]

    assert found == [False, False, False, False, True]
