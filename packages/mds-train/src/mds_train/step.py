"""One training step: forward and backward over the micro batches, then the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mds_core.groups import ProcessGroups
from mds_train.batches import ModelInput
from mds_train.engines.interface import Engine, Update
from mds_train.exchange import sum_over
from mds_train.skipped_step import SkipCause, find_cause

__all__ = ["StepOutcome", "train_step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What one step found; the same on all ranks."""

    loss: float
    """Mean over the counted tokens of the global batch; the sum of the terms."""

    terms: dict[str, float]
    """The terms of the loss by name; none where there is but one."""

    update: Update

    cause: SkipCause | None = None
    """Why the step was skipped, if it was."""


def train_step(
    engine: Engine,
    batch: Sequence[ModelInput],
    *,
    groups: ProcessGroups,
    lr: float,
    weight_decay: float,
    mark: Callable[[str], None] = lambda _: None,
) -> StepOutcome:
    """Take one optimizer step on a global batch.

    The loss is the mean over the counted tokens of the whole global batch, not a mean of means: so
    it and the gradient are the same however the batch is cut into micro batches and ranks.

    Args:
        engine: Holds the model.
        batch: This rank's micro batches, on the model's device.
        groups: This rank's process groups.
        lr: Learning rate of this update.
        weight_decay: Weight decay of this update.
        mark: Is told what comes next.
    """
    counted = torch.stack([micro.counts() for micro in batch]).sum(0)
    counted = sum_over(counted, group=groups.dp).clamp(min=1.0)
    # The engine averages over the ranks of dp and ulysses, which this takes back.
    mark("forward and backward")
    replicas = groups.dp_size * groups.ulysses_size
    total = engine.accumulate(batch, weights=[replicas / count for count in counted.tolist()])
    mark("update")
    update = engine.step(lr=lr, weight_decay=weight_decay)
    cause = None
    if not update.applied:
        cause = find_cause(update.broken, batch=batch, total=total)
    mark("sum of the loss")
    terms = sum_over(total, group=groups.dp) / counted
    return StepOutcome(
        loss=terms.sum().item(), terms=batch[0].named(terms), update=update, cause=cause
    )
