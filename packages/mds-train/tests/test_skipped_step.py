from __future__ import annotations

import torch

from mds_train.batches import MicroBatch
from mds_train.engines.interface import BrokenGradient
from mds_train.skipped_step import SkipCause, find_cause


def micro_batch(samples: list[int]) -> MicroBatch:
    whole = torch.zeros(len(samples), 2, dtype=torch.int64)
    return MicroBatch(
        tokens=whole,
        labels=whole,
        loss_mask=whole.float(),
        position_ids=whole,
        samples=torch.tensor(samples),
    )


def cause(broken: list[BrokenGradient], *, total: float) -> SkipCause:
    batch, sums = [micro_batch([4, 5]), micro_batch([6, 7])], torch.tensor([1.0, total])
    return find_cause(broken, batch=batch, total=sums)


def test_gradients_and_samples_are_named() -> None:
    gradients = [BrokenGradient(name=f"w{index}", count=2, numel=9) for index in range(4)]

    found = cause(gradients, total=float("nan"))

    assert found.sentence() == (
        "Not finite: w0 on rank 0 (2 of 9 elements), w1 on rank 0 (2 of 9 elements), w2 on rank 0 "
        "(2 of 9 elements) and 1 more. The loss itself was not finite on rank 0 (samples 4, 5, 6, "
        "7)."
    )
    assert found.details()["gradients"][0] == {"rank": 0, "name": "w0", "count": 2, "numel": 9}
    assert found.details()["samples_of_ranks"] == {"0": [4, 5, 6, 7]}


def test_a_finite_loss_blames_no_samples() -> None:
    found = cause([], total=3.0)

    assert (found.samples, found.sentence()) == ((), "")


def test_each_parameter_is_named_once_and_every_rank_is_kept() -> None:
    one = BrokenGradient(name="w", count=1, numel=4)
    found = SkipCause(gradients=((0, one), (1, one)), parameters=1, samples=())

    assert found.sentence() == "Not finite: w on rank 0 (1 of 4 elements)."
    assert [each["rank"] for each in found.details()["gradients"]] == [0, 1]
