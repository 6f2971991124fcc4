from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mds_core import ProcessGroups
from mds_train.batches import MicroBatch
from mds_train.evaluation import evaluate, shares


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [1, 5, 6, 12])
def test_ranks_share_out_every_sample_once_in_equally_many_passes(
    size: int, num_samples: int
) -> None:
    parts = [shares(num_samples, micro_batch_size=2, rank=rank, size=size) for rank in range(size)]

    counted = [number for part in parts for numbers, count in part for number in numbers[:count]]
    assert sorted(counted) == list(range(num_samples))
    assert len({len(part) for part in parts}) == 1
    assert all(len(numbers) == 2 for part in parts for numbers, _ in part)


class Samples:
    """Sample n has n + 1 counted tokens of 4."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        return {
            "tokens": np.full(4, index),
            "labels": np.full(4, index),
            "loss_mask": (np.arange(4) <= index).astype(np.float32),
            "position_ids": np.arange(4),
        }


class LossIsTheToken:
    """An engine whose model has the token's number as its loss."""

    def losses(self, batch: Sequence[MicroBatch]) -> torch.Tensor:
        return torch.stack(
            [(micro.tokens * micro.loss_mask).double().sum() for micro in batch]
        ).sum()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        yield


def test_the_loss_is_the_mean_over_counted_tokens_not_a_mean_of_means() -> None:
    found = evaluate(
        LossIsTheToken(),  # type: ignore[arg-type]
        Samples(),
        num_samples=10,
        micro_batch_size=2,
        groups=ProcessGroups.single(),
        device=torch.device("cpu"),
    )

    assert found.tokens == 1 + 2 + 3
    assert found.loss == pytest.approx((0 * 1 + 1 * 2 + 2 * 3) / 6)
