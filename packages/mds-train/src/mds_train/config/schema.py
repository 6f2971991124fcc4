"""The whole configuration of a run: frozen tables that are checked against each other."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mds_train.config.checkpoint import CheckpointConfig
from mds_train.config.data import DataConfig
from mds_train.config.family import check_family_data, check_family_layout
from mds_train.config.fp16 import Fp16Config
from mds_train.config.layout import (
    check_micro_batches,
    check_sequence_shares,
    check_stages,
    check_whole_heads,
)
from mds_train.config.memory import MemoryConfig
from mds_train.config.model import ModelConfig
from mds_train.config.optimizer import OptimizerConfig, ScheduleConfig
from mds_train.config.parallel import ParallelConfig
from mds_train.config.training import LoopConfig
from mds_train.config.watch import WatchConfig

__all__ = ["TrainConfig", "continues_itself"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Everything that decides what a run computes. The tables are those of the TOML file."""

    model: ModelConfig
    """Shape of the model."""

    data: DataConfig
    """Which tokens."""

    train: LoopConfig
    """How long, how large a batch."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """What turns gradients into updates."""

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate and weight decay over time."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the ranks share the work."""

    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """What is given up in speed for memory."""

    fp16: Fp16Config = field(default_factory=Fp16Config)
    """How the loss is scaled where train.precision is fp16."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and loading."""

    watch: WatchConfig = field(default_factory=WatchConfig)
    """Progress and metrics."""

    def __post_init__(self) -> None:
        check_family_data(self.model, self.data)
        check_family_layout(self.model, self.data, self.parallel)
        check_sequence(self)
        check_schedule(self)
        check_backup(self)
        check_growth(self)
        check_whole_heads(self.model, self.parallel)
        check_sequence_shares(self.data, self.parallel)
        check_stages(self.model, self.parallel)

    @property
    def flops_per_token(self) -> float:
        """Operations of a training step for each token of the samples, forward and backward."""
        data = self.data
        flops = self.model.flops_of_sample(
            data.seq_length, decoder_seq_length=data.decoder_seq_length
        )
        return flops / data.tokens_of_sample

    def as_dict(self) -> dict[str, Any]:
        """The tables as plain dictionaries that JSON can hold; None stands for "not set"."""
        return dataclasses.asdict(self)

    def check_world(self, world_size: int) -> None:
        """Check the batch against the number of ranks that really started.

        Raises:
            ValueError: If the global batch cannot be shared out evenly.
        """
        dp_size = self.parallel.dp_size(world_size)
        at_once = self.train.micro_batch_size * dp_size
        ramp = self.train.rampup_batch_size
        for size in ramp[:2]:
            if size % at_once:
                raise ValueError(
                    f"train.rampup_batch_size {list(ramp)}: {size} is not a multiple of "
                    f"train.micro_batch_size {self.train.micro_batch_size} * {dp_size} "
                    f"data-parallel ranks = {at_once}; change one of them or the number of ranks."
                )
        if self.train.global_batch_size % at_once:
            raise ValueError(
                f"train.global_batch_size {self.train.global_batch_size} is not a multiple of "
                f"train.micro_batch_size {self.train.micro_batch_size} * {dp_size} data-parallel "
                f"ranks = {at_once}; change one of them or the number of ranks."
            )
        check_micro_batches(self.parallel, count=self.train.global_batch_size // at_once)


def check_sequence(config: TrainConfig) -> None:
    """Learned positions must reach as far as the samples."""
    positions, length = config.model.max_position_embeddings, config.data.seq_length
    if config.model.position_embedding == "learned" and length > positions:
        raise ValueError(
            f"data.seq_length {length} is longer than model.max_position_embeddings {positions}; "
            f"learned positions end there, so shorten the samples or give the model more positions."
        )


def check_schedule(config: TrainConfig) -> None:
    """The parts of the schedule must fit into one another."""
    schedule = config.schedule
    decay_steps = schedule.decay_steps or config.train.train_steps
    if schedule.min_lr > config.optimizer.lr:
        raise ValueError(
            f"schedule.min_lr {schedule.min_lr} is above optimizer.lr {config.optimizer.lr}."
        )
    if schedule.kind != "constant" and schedule.warmup_steps >= decay_steps:
        raise ValueError(
            f"schedule.warmup_steps {schedule.warmup_steps} leaves nothing of the {decay_steps} "
            f"updates of the schedule; shorten the warm-up or lengthen schedule.decay_steps."
        )


def check_growth(config: TrainConfig) -> None:
    """What grows from step to step must stay divisible, and a pipeline's shapes are fixed."""
    data, parallel = config.data, config.parallel
    grows = data.curriculum_start_length is not None
    shares = parallel.ulysses_size * (parallel.tp_size if parallel.sequence_parallel else 1)
    if grows and data.curriculum_multiple % shares:
        raise ValueError(
            f"data.curriculum_multiple {data.curriculum_multiple} is not a multiple of the "
            f"{shares} ranks that share a sequence (parallel.ulysses_size, "
            f"parallel.sequence_parallel)."
        )
    if parallel.pp_size > 1 and (grows or config.train.rampup_batch_size):
        what = "data.curriculum_start_length" if grows else "train.rampup_batch_size"
        raise ValueError(
            f"{what} does not go together with pipeline stages (parallel.pp_size "
            f"{parallel.pp_size}), whose shapes are fixed; use pp_size 1, or leave it out."
        )


def check_backup(config: TrainConfig) -> None:
    """The second place of checkpoints must be another one than the first."""
    backup, run_dir = config.checkpoint.backup, Path(config.train.run_dir)
    if (
        backup is not None
        and "://" not in backup
        and Path(backup).resolve()
        in (
            run_dir.resolve(),
            (run_dir / "checkpoints").resolve(),
        )
    ):
        raise ValueError(
            f"checkpoint.backup {backup} is the run's own folder; name another place, best on "
            f"another disk, or none (--checkpoint.backup none)."
        )


def continues_itself(config: TrainConfig) -> bool:
    """Whether checkpoint.load names the run's own folder: the original's `--save X --load X`."""
    load, run_dir = config.checkpoint.load, Path(config.train.run_dir).resolve()
    return load is not None and Path(load).resolve() in (run_dir, run_dir / "checkpoints")
