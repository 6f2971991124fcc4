"""A watcher that keeps what it was told, and runs that ranks can be asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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


def train_and_record(config: TrainConfig, resume: bool = False) -> Recorder:
    """Train on the ranks that run now."""
    from mds_train import train

    recorder = Recorder()
    train(config, resume=resume, watchers=[recorder])
    return recorder


def losses_of(recorders: list[Any]) -> list[float]:
    """The losses, which every rank must have seen alike."""
    first: list[float] = recorders[0].losses
    assert all(recorder.losses == first for recorder in recorders)
    return first
