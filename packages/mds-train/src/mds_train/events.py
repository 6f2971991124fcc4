"""What the loop tells its watchers. The loop calls them; consoles, files and plots implement them.

Every rank calls the watchers that it was given; the numbers, except for times, are the same on
all ranks. A watcher that writes files is given to rank 0 only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mds_train.config import TrainConfig

__all__ = [
    "EventReport",
    "FinishReport",
    "StartReport",
    "StepReport",
    "ValidationReport",
    "Watcher",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class StartReport:
    """Given once, when model and data are ready and before the first step."""

    config: TrainConfig
    run_dir: Path
    rank: int
    world_size: int
    parallel: dict[str, int]
    """Degrees: tp, pp, dp, ulysses, ep, zero_stage."""
    num_parameters: int
    flops_per_token: float
    step: int
    """Steps already done: 0, or those of the checkpoint."""
    consumed_samples: int
    consumed_tokens: int
    resumed_from: Path | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One finished training step."""

    step: int
    """1 for the first step."""
    loss: float
    """Mean over the counted tokens of the global batch, before the update; the sum of its terms."""
    lr: float
    weight_decay: float
    grad_norm: float
    """Global norm before clipping."""
    seconds: float
    data_seconds: float
    """Part of `seconds` that was spent waiting for data."""
    tokens_per_second: float
    """Of the whole job."""
    batch_samples: int
    """Samples of this step; fewer than train.global_batch_size while the batch grows."""
    seq_length: int
    """Tokens of each of them; fewer than data.seq_length in a curriculum."""
    consumed_samples: int
    consumed_tokens: int
    applied_updates: int
    skipped_steps: int
    """Steps so far whose gradients were not finite."""
    skipped: bool
    """This step was one of them."""
    loss_scale: float = 1.0
    """What the loss was multiplied by before the backward pass; other than 1 with fp16 only."""
    loss_terms: dict[str, float] = field(default_factory=dict)
    """The terms of the loss by name (of a BERT: words, binary); empty where there is but one."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of each part of the step on this rank; exact on accelerators with watch.timers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationReport:
    """The loss on held-out samples."""

    step: int
    loss: float
    """Mean over all counted tokens; the sum of its terms."""
    tokens: int
    seconds: float
    name: str = "validation"
    loss_terms: dict[str, float] = field(default_factory=dict)
    """As in `StepReport`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EventReport:
    """Something that happens now and then."""

    event: str
    """"resume", "save", "skip", "signal", "prune", ..."""
    step: int
    message: str
    """A sentence for people."""
    details: dict[str, Any] = field(default_factory=dict)
    """What JSON can hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishReport:
    """The end of a run that ended well."""

    step: int
    reason: str
    """"done", "exit-step" or the name of the signal."""
    loss: float | None
    validation_loss: float | None
    checkpoint: Path | None
    """The last checkpoint of the run."""
    seconds: float


class Watcher(Protocol):
    """Looks on. It must not change anything that the loop uses."""

    def on_start(self, report: StartReport) -> None:
        """The run begins or goes on."""

    def on_step(self, report: StepReport) -> None:
        """A step is done."""

    def on_validation(self, report: ValidationReport) -> None:
        """A validation loss is known."""

    def on_event(self, report: EventReport) -> None:
        """Something else happened."""

    def on_finish(self, report: FinishReport) -> None:
        """The run ended."""
