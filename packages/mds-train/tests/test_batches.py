from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from mds_train.batches import BatchReader, GuardedSamples, collate
from mds_train.config.batch_growth import BatchSizes


class Numbered:
    """Sample n holds the number n everywhere."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        return {
            "tokens": np.full(3, index),
            "labels": np.full(3, index + 1),
            "loss_mask": np.ones(3, np.float32),
            "position_ids": np.arange(3),
        }


def reader(*, rank: int = 0, size: int = 1, workers: int = 0, length: int = 32) -> BatchReader:
    return BatchReader(
        Numbered(length),
        sizes=BatchSizes(final=8, start=8),
        micro_batch_size=2,
        rank=rank,
        size=size,
        workers=workers,
    )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_any_number_of_ranks_sees_the_same_global_batch(size: int) -> None:
    ranks = [reader(rank=rank, size=size) for rank in range(size)]

    seen = [micro.samples.tolist() for part in ranks for micro in part.read(16)]

    assert sorted(number for part in seen for number in part) == list(range(16, 24))
    assert all(len(samples) == 2 for samples in seen)


def test_ranks_together_take_neighbouring_samples_in_each_micro_batch() -> None:
    second = reader(rank=1, size=2)

    assert [micro.samples.tolist() for micro in second.read(0)] == [[2, 3], [6, 7]]


def test_reading_ahead_changes_nothing() -> None:
    plain, ahead = reader(), reader(workers=2)

    for consumed in (0, 8, 24, 0):
        expected = [micro.tokens.tolist() for micro in plain.read(consumed)]
        assert [micro.tokens.tolist() for micro in ahead.read(consumed)] == expected
    ahead.close()


def test_reading_past_the_end_says_what_to_do() -> None:
    with pytest.raises(
        ValueError, match=r"samples 32 to 40 .* made for 32; raise train.train_steps"
    ):
        reader().read(32)


def test_collate_stacks_samples() -> None:
    micro = collate(Numbered(9), [4, 7])

    assert micro.tokens.tolist() == [[4, 4, 4], [7, 7, 7]]
    assert micro.labels.tolist() == [[5, 5, 5], [8, 8, 8]]
    assert micro.samples.tolist() == [4, 7]


def test_a_token_beyond_the_vocabulary_is_refused() -> None:
    samples = GuardedSamples(Numbered(9), vocab_size=8)

    assert len(samples) == 9
    assert samples[6]["tokens"].tolist() == [6, 6, 6]
    with pytest.raises(
        ValueError, match=r"sample 7 holds the token id 8, but model.vocab_size is 8"
    ):
        samples[7]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_growing_batch_leaves_no_sample_out(workers: int) -> None:
    growing = BatchReader(
        Numbered(64),
        sizes=BatchSizes(final=8, start=4, increment=4, ramp_samples=12),
        micro_batch_size=2,
        rank=0,
        size=1,
        workers=workers,
    )
    consumed, seen = 0, []
    for _ in range(5):
        batch = growing.read(consumed)
        seen.append([number for micro in batch for number in micro.samples.tolist()])
        consumed += len(seen[-1])
    growing.close()

    assert [len(numbers) for numbers in seen] == [4, 4, 4, 8, 8]
    assert [number for numbers in seen for number in numbers] == list(range(28))


def test_cut_samples_keep_their_numbers_and_first_positions() -> None:
    micro = collate(Numbered(4), [1, 3])

    cut = micro.cut(2)

    assert cut.tokens.tolist() == [[1, 1], [3, 3]]
    assert cut.labels.shape == cut.loss_mask.shape == cut.position_ids.shape == (2, 2)
    assert cut.samples.tolist() == [1, 3]
    assert micro.cut(3) is micro
