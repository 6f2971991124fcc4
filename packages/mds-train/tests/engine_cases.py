"""What the tests of the engine, the loop and the checkpoints share: a tiny run and a watcher."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mds_ckpt import open_checkpoint
from mds_data import write_store
from mds_train import TrainConfig, TrainResult, train
from mds_train.config import (
    CheckpointConfig,
    DataConfig,
    LoopConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
    WatchConfig,
)
from mds_train.events import (
    EventReport,
    FinishReport,
    StartReport,
    StepReport,
    ValidationReport,
)

VOCABULARY = 100
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=VOCABULARY,
    max_position_embeddings=16,
    make_vocab_size_divisible_by=8,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)


def make_store(folder: Path) -> Path:
    """A store of random documents, 90 % to train on."""
    random = np.random.default_rng(7)
    documents = [random.integers(0, VOCABULARY, random.integers(8, 60)) for _ in range(80)]
    split = {"train": (0.0, 0.9), "valid": (0.9, 1.0)}
    path = folder / "store"
    write_store(path, documents, vocab_size=VOCABULARY, eod_id=0, split=split)
    return path


def tiny_config(
    folder: Path, *, model: ModelConfig = MODEL, **changes: dict[str, Any]
) -> TrainConfig:
    """A run of a few steps in ``folder``; ``changes`` replace fields of the tables."""
    config = TrainConfig(
        model=model,
        data=DataConfig(store=str(folder / "store"), seq_length=16),
        train=LoopConfig(
            run_dir=str(folder / "run"),
            train_steps=6,
            global_batch_size=8,
            micro_batch_size=2,
            seed=7,
        ),
        optimizer=OptimizerConfig(lr=1e-2),
        schedule=ScheduleConfig(warmup_steps=2, min_lr=1e-3),
        parallel=ParallelConfig(),
        checkpoint=CheckpointConfig(save_interval=3, keep_last=0),
        watch=WatchConfig(eval_interval=3, eval_samples=5),
    )
    tables = {name: replace(getattr(config, name), **values) for name, values in changes.items()}
    return replace(config, **tables)


@dataclass
class Recorder:
    """A watcher that keeps every report."""

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
        return [step.loss for step in self.steps]


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


def run_here(config: TrainConfig, *, resume: bool = False) -> tuple[Recorder, TrainResult]:
    """Train on the ranks that run now."""
    recorder = Recorder()
    return recorder, train(config, resume=resume, watchers=[recorder])
