from __future__ import annotations

import pytest

from mds_train.config import LoopConfig
from mds_train.config.batch_growth import BatchSizes


def megatrons_size(consumed: int, *, start: int, increment: int, samples: int, final: int) -> int:
    """RampupBatchsizeNumMicroBatches of the original, in its own words (with floats)."""
    increments = (final - start) // increment
    per_increment = samples / increments
    if consumed > samples:
        return final
    return min(start + int(consumed / per_increment) * increment, final)


@pytest.mark.parametrize(
    ("start", "increment", "samples", "final"),
    [(16, 8, 300000, 64), (4, 4, 96, 32), (32, 32, 1024, 256), (2, 2, 7, 8)],
)
def test_sizes_are_megatrons(start: int, increment: int, samples: int, final: int) -> None:
    sizes = BatchSizes(final=final, start=start, increment=increment, ramp_samples=samples)

    for consumed in range(0, samples + 3 * final, max(1, samples // 997)):
        expected = megatrons_size(
            consumed, start=start, increment=increment, samples=samples, final=final
        )
        assert sizes.at(consumed) == expected, consumed


def test_steps_and_samples_are_those_of_walking_step_by_step() -> None:
    sizes = BatchSizes(final=32, start=4, increment=4, ramp_samples=96)
    consumed, walked = 0, [0]
    for _ in range(40):
        consumed += sizes.at(consumed)
        walked.append(consumed)

    assert [sizes.consumed_after(step) for step in range(41)] == walked
    for samples in range(walked[-1]):
        assert sizes.steps_for(samples) == sum(total <= samples for total in walked[1:])


def test_without_a_ramp_every_batch_is_the_global_one() -> None:
    sizes = BatchSizes.from_config(LoopConfig(run_dir="x", train_steps=1, global_batch_size=8))

    assert [sizes.at(0), sizes.at(10**9)] == [8, 8]
    assert (sizes.consumed_after(5), sizes.steps_for(43)) == (40, 5)


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        ((8, 8), "three whole numbers"),
        ((16, 10, 100), "does not lead to"),
        ((80, 8, 100), "starts at 80, above train.global_batch_size 64"),
        ((0, 8, 9), "three"),
    ],
)
def test_a_ramp_that_cannot_be_is_refused(ramp: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoopConfig(run_dir="x", train_steps=1, global_batch_size=64, rampup_batch_size=ramp)
