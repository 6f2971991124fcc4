from __future__ import annotations

import math

import pytest

from mds_train.config import DataConfig
from mds_train.config.batch_growth import BatchSizes
from mds_train.config.length_growth import SequenceLengths


def deepspeeds_length(
    step: int, *, low: int, high: int, total: int, multiple: int, root: int
) -> int:
    """DeepSpeed's CurriculumScheduler, fixed_root (fixed_linear is root 1), in its own words."""
    difficulty = math.pow(step / total, 1.0 / root)
    difficulty = math.floor(difficulty * (high - low) + low)
    difficulty -= difficulty % multiple
    return min(difficulty, high)


@pytest.mark.parametrize("root", [1, 2, 3])
def test_lengths_are_deepspeeds(root: int) -> None:
    lengths = SequenceLengths(final=2048, start=64, steps=1000, multiple=8, root=root)

    for step in range(1, 1200):
        expected = deepspeeds_length(step, low=64, high=2048, total=1000, multiple=8, root=root)
        assert lengths.at(step) == expected, step


def test_tokens_are_counted_as_they_are_cut() -> None:
    lengths = SequenceLengths(final=32, start=8, steps=3, multiple=8)
    sizes = BatchSizes(final=4, start=2, increment=2, ramp_samples=3)

    # Lengths 16, 24, 32, 32; sizes 2, 2, 4, 4.
    assert lengths.tokens_of(4, sizes=sizes) == 32 + 48 + 128 + 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"curriculum_start_length": 8}, "belong together"),
        ({"curriculum_start_length": 80, "curriculum_steps": 4}, "must not be longer"),
        ({"curriculum_start_length": 12, "curriculum_steps": 4}, "must be multiples of"),
    ],
)
def test_a_curriculum_that_cannot_be_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(store="x", seq_length=64, **changes)  # type: ignore[arg-type]
