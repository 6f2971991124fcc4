"""Gives a run's model the teacher that it learns from, and says until when it is asked."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from mds_ckpt import Checkpoint
from mds_core.config import Execution, GPTConfig
from mds_core.groups import ProcessGroups
from mds_core.models import GPT, DistilledGPT
from mds_core.pipeline import Pipeline
from mds_train.config import TrainConfig
from mds_train.errors import InputError
from mds_train.exchange import attempt_on_all
from mds_train.generate.model import fill
from mds_train.model_building import parameter_dtype
from mds_train.model_source import folder_to_load, open_model
from mds_train.saving.sealing import key_for

__all__ = ["load_teacher", "set_teaching"]


def load_teacher(model: nn.Module, config: TrainConfig, groups: ProcessGroups) -> None:
    """Give a run's model its teacher, if it has one: this rank's share, weights only. Collective.

    Raises:
        InputError: There is no such model, or it has another vocabulary.
    """
    if config.distill.teacher is None or not isinstance(model, (DistilledGPT, Pipeline)):
        return
    opened: list[Checkpoint] = []
    # Before stages are built, for which all ranks are needed.
    attempt_on_all(lambda: opened.append(_open(config)))
    checkpoint = opened[0]
    shape = replace(
        GPTConfig.from_record(checkpoint.config),
        make_vocab_size_divisible_by=config.model.make_vocab_size_divisible_by,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    device = next(model.parameters()).device
    try:
        if isinstance(model, Pipeline):
            stages = _stages(shape, config, groups, like=model)
            for stage in stages.models:
                fill(stage, checkpoint)  # type: ignore[arg-type]
            model.set_teacher(stages, config.distill.loss)
        else:
            model.set_teacher(
                _undivided(shape, config, groups, checkpoint=checkpoint, device=device),
                config.distill.loss,
            )
    except ValueError as error:
        raise InputError(f"{checkpoint.path}: {error}") from error


def _open(config: TrainConfig) -> Checkpoint:
    assert config.distill.teacher is not None
    path = folder_to_load(config.distill.teacher)
    checkpoint = open_model(path, key=key_for(path, config.checkpoint))
    if checkpoint.model.family != "gpt":
        raise InputError(f"{path}: the teacher is a {checkpoint.model.family}, not GPT-like.")
    return checkpoint


def _execution(config: TrainConfig) -> Execution:
    """Ranks hold the same positions as of the student."""
    return Execution(
        sequence_parallel=config.parallel.sequence_parallel,
        sequence_sharing="ring" if config.parallel.in_a_ring else "ulysses",
    )


def _undivided(
    shape: GPTConfig,
    config: TrainConfig,
    groups: ProcessGroups,
    *,
    checkpoint: Checkpoint,
    device: torch.device,
) -> GPT:
    dtype = parameter_dtype(config)
    teacher = GPT(shape, groups, dtype=dtype, device="meta", execution=_execution(config))
    teacher.to_empty(device=device)
    fill(teacher, checkpoint)
    return teacher


def _stages(
    shape: GPTConfig, config: TrainConfig, groups: ProcessGroups, *, like: Pipeline
) -> Pipeline:
    """On as many stages as the student has, so that both last ones are on the same rank."""
    parallel = config.parallel
    return Pipeline(
        shape,
        groups,
        micro_batches=like.micro_batches,
        schedule=parallel.pipeline_schedule,
        chunks=parallel.stage_count // parallel.pp_size,
        dtype=parameter_dtype(config),
        device=next(like.parameters()).device,
        execution=_execution(config),
    )


def set_teaching(model: nn.Module, config: TrainConfig, *, step: int) -> None:
    """Ask the teacher in this step, or no more."""
    if isinstance(model, (DistilledGPT, Pipeline)):
        last = config.distill.until_step
        model.teaching = last is None or step <= last
