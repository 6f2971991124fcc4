"""The whole configuration of a run: frozen tables that are checked against each other."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass, field
from typing import Any

from mds_train.config.checkpoint import CheckpointConfig
from mds_train.config.data import DataConfig
from mds_train.config.distill import DistillConfig
from mds_train.config.engine import EngineConfig
from mds_train.config.family import (
    check_family_data,
    check_family_layout,
    check_family_memory,
)
from mds_train.config.fp16 import Fp16Config
from mds_train.config.layout import (
    check_expert_shares,
    check_micro_batches,
    check_sequence_shares,
    check_stages,
    check_whole_heads,
)
from mds_train.config.lora import LoraConfig
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

    engine: EngineConfig = field(default_factory=EngineConfig)
    """What is handed to DeepSpeed besides."""

    fp16: Fp16Config = field(default_factory=Fp16Config)
    """How the loss is scaled where train.precision is fp16."""

    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters in place of the weights."""

    distill: DistillConfig = field(default_factory=DistillConfig)
    """A teacher to learn from."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and loading."""

    watch: WatchConfig = field(default_factory=WatchConfig)
    """Progress and metrics."""

    def __post_init__(self) -> None:
        check_family_data(self.model, self.data)
        check_family_layout(self.model, self.data, self.parallel)
        check_family_memory(self.model, self.memory)
        check_sequence(self)
        check_schedule(self)
        check_backup(self)
        check_growth(self)
        check_offload(self)
        check_muon(self)
        check_adapters(self)
        check_teacher(self)
        check_fresh_start(self)
        check_whole_heads(self.model, self.parallel)
        check_sequence_shares(self.data, self.parallel)
        check_stages(self.model, self.parallel)
        check_expert_shares(self.model, self.parallel)

    @property
    def flops_per_token(self) -> float:
        """Operations of a training step for each token of the samples, forward and backward."""
        data = self.data
        flops = self.model.flops_of_sample(
            data.seq_length, decoder_seq_length=data.decoder_seq_length
        )
        if self.lora.rank:
            # Products with weights have no gradient of these; those of attention (which are what
            # grows with the length) keep all three passes.
            flops -= self.model.flops_of_sample(1) * data.seq_length / 3
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
        sizes = [self.train.global_batch_size]
        if ramp:
            sizes += range(ramp[0], self.train.global_batch_size, ramp[1])
        for size in sizes:
            check_micro_batches(self.parallel, count=size // at_once)


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
    """What grows from step to step must stay divisible."""
    data, parallel = config.data, config.parallel
    grows = data.curriculum_start_length is not None
    shares = parallel.ulysses_size * (parallel.tp_size if parallel.sequence_parallel else 1)
    if parallel.in_a_ring:
        shares = math.lcm(shares, 2 * parallel.ulysses_size)
    if grows and data.curriculum_multiple % shares:
        raise ValueError(
            f"data.curriculum_multiple {data.curriculum_multiple} is not a multiple of the "
            f"{shares} ranks that share a sequence (parallel.ulysses_size, "
            f"parallel.sequence_parallel)."
        )


def check_offload(config: TrainConfig) -> None:
    """What ZeRO moves to the host it must have cut before."""
    memory, parallel = config.memory, config.parallel
    if memory.offload_optimizer != "none" and parallel.zero_stage == 0:
        raise ValueError(
            f'memory.offload_optimizer is "{memory.offload_optimizer}", but parallel.zero_stage is '
            f"0; use zero_stage 1 to 3."
        )
    needs_cutting = {
        "memory.offload_parameters": memory.offload_parameters != "none",
        "memory.offload_ratio": memory.offload_ratio < 1,
    }
    for key, is_set in needs_cutting.items():
        if is_set and parallel.zero_stage != 3:
            raise ValueError(
                f"{key} is set, but parallel.zero_stage is {parallel.zero_stage}; only zero_stage "
                f"3 can do that."
            )
    implementation = config.optimizer.implementation
    if memory.offload_ratio < 1 and implementation != "deepspeed-cpu":
        raise ValueError(
            f'memory.offload_ratio below 1 needs optimizer.implementation "deepspeed-cpu", but it '
            f'is "{implementation}".'
        )


def check_adapters(config: TrainConfig) -> None:
    """Adapters stand beside weights that are loaded."""
    if not config.lora.rank:
        return
    checkpoint, model = config.checkpoint, config.model
    wrong = {
        "needs checkpoint.load, the model that it adapts": checkpoint.load is None,
        "takes weights alone; set checkpoint.load_weights_only": not checkpoint.load_weights_only,
        "needs the checkpoint; unset checkpoint.from_scratch_if_missing": (
            checkpoint.from_scratch_if_missing
        ),
        "fills a folder of its own; choose another train.run_dir": continues_itself(config),
        f"is for GPT-like models, not for a {model.family}": model.family != "gpt",
        "does not adapt experts; leave linear_fc1 and linear_fc2 out of lora.targets": (
            any(model.experts) and any("fc" in target for target in config.lora.targets)
        ),
    }
    for why, is_so in wrong.items():
        if is_so:
            raise ValueError(f"lora.rank is {config.lora.rank}, and LoRA {why}.")


def check_muon(config: TrainConfig) -> None:
    """Muon puts matrices together where the model is."""
    if config.optimizer.name != "muon":
        return
    if config.memory.offload_optimizer != "none":
        raise ValueError(
            f'optimizer.name "muon" puts whole matrices together where the model computes, but '
            f'memory.offload_optimizer is "{config.memory.offload_optimizer}"; use "none", or '
            f'optimizer.name "adamw".'
        )
    if config.parallel.ep_size > 1:
        raise ValueError(
            f'optimizer.name "muon" does not step experts that ranks share out '
            f'(parallel.ep_size {config.parallel.ep_size}); use ep_size 1, or "adamw".'
        )


def check_teacher(config: TrainConfig) -> None:
    """A teacher stands beside a GPT."""
    if config.distill.teacher is None:
        return
    wrong = {
        f"is for GPT-like models, not for a {config.model.family}": config.model.family != "gpt",
        "compares true vocabularies; unset model.legacy_vocab_softmax": (
            config.model.legacy_vocab_softmax
        ),
    }
    for why, is_so in wrong.items():
        if is_so:
            raise ValueError(f"distill.teacher is set, and distillation {why}.")


def check_fresh_start(config: TrainConfig) -> None:
    """A run that goes on with itself takes everything, so weights alone are another run's."""
    if config.checkpoint.load_weights_only and continues_itself(config):
        raise ValueError(
            f"checkpoint.load_weights_only (--finetune, --no-load-optim) starts a run afresh, but "
            f"checkpoint.load {config.checkpoint.load} is the run's own folder, which it would go "
            f"on with; choose another train.run_dir (--save), or leave load_weights_only out."
        )


def check_backup(config: TrainConfig) -> None:
    """The second place of checkpoints must be another one than the first."""
    backup = config.checkpoint.backup
    if backup is not None and "://" not in backup and _is_of_run(backup, config):
        raise ValueError(
            f"checkpoint.backup {backup} is the run's own folder; name another place, best on "
            f"another disk, or none (--checkpoint.backup none)."
        )


def continues_itself(config: TrainConfig) -> bool:
    """Whether checkpoint.load names the run's own folder: the original's `--save X --load X`."""
    load = config.checkpoint.load
    return load is not None and _is_of_run(load, config)


def _is_of_run(path: str, config: TrainConfig) -> bool:
    """Whether a path is the run's folder, or its checkpoints'. Links without an end are neither."""
    run_dir = os.path.realpath(config.train.run_dir)
    return os.path.realpath(path) in (run_dir, os.path.realpath(f"{run_dir}/checkpoints"))
