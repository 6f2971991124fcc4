"""A watcher that keeps what it was told, and runs that ranks can be asked to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mds_ckpt import open_checkpoint
from mds_kernels.testing import run_ranks
from mds_train.config import TrainConfig
from mds_train.events import (
    EventReport,
    FinishReport,
    StartReport,
    StepReport,
    ValidationReport,
)


@dataclass
class Recorder:
    """Keeps every report."""

    steps: list[StepReport] = field(default_factory=list)
    validations: list[ValidationReport] = field(default_factory=list)
    events: list[EventReport] = field(default_factory=list)
    starts: list[StartReport] = field(default_factory=list)
    finishes: list[FinishReport] = field(default_factory=list)

    def on_start(self, report: StartReport) -> None:
        self.starts.append(report)

    def on_step(self, report: StepReport) -> None:
        self.steps.append(report)

    def on_validation(self, report: ValidationReport) -> None:
        self.validations.append(report)

    def on_event(self, report: EventReport) -> None:
        self.events.append(report)

    def on_finish(self, report: FinishReport) -> None:
        self.finishes.append(report)

    @property
    def losses(self) -> list[float]:
        """Training loss of each step."""
        return [step.loss for step in self.steps]


def train_and_record(config: TrainConfig, *, resume: bool = False) -> Recorder:
    """Train on the ranks that run now."""
    from mds_train import train

    recorder = Recorder()
    train(config, resume=resume, watchers=[recorder])
    return recorder


def train_each(configs: Sequence[TrainConfig]) -> list[Recorder]:
    """Train one run after the other on the ranks that run now; starting ranks is the slow part."""
    return [train_and_record(config) for config in configs]


def losses_on(configs: Mapping[str, TrainConfig], *, ranks: int) -> dict[str, list[float]]:
    """Losses of these runs, each on so many ranks, which must all have seen the same."""
    found = run_ranks(train_each, ranks, list(configs.values()), timeout=400)
    for others in found[1:]:
        for recorder, first in zip(others, found[0], strict=True):
            assert recorder.losses == first.losses
    return {name: run.losses for name, run in zip(configs, found[0], strict=True)}


def checkpoint_differences(first: Path, second: Path) -> list[str]:
    """States that are not bitwise equal in two checkpoints, by name."""
    one, other = open_checkpoint(first), open_checkpoint(second)
    assert one.states.keys() == other.states.keys()
    return [
        f"{state} of {name}"
        for state, tensors in one.states.items()
        for name, tensor in tensors.items()
        if tensor.numpy().tobytes() != other.tensor(name, state).numpy().tobytes()
    ]
