"""Gives a run's model the teacher that it learns from, and says until when it is asked."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from mds_core.config import Execution, GPTConfig
from mds_core.groups import ProcessGroups
from mds_core.models import GPT, DistilledGPT
from mds_train.config import TrainConfig
from mds_train.errors import InputError
from mds_train.generate.model import fill
from mds_train.model_building import parameter_dtype
from mds_train.model_source import folder_to_load, open_model
from mds_train.saving.sealing import key_for

__all__ = ["load_teacher", "set_teaching"]


def load_teacher(model: nn.Module, config: TrainConfig, groups: ProcessGroups) -> None:
    """Give a run's model its teacher, if it has one: this rank's share, weights only.

    Raises:
        InputError: There is no such model, or it has another vocabulary.
    """
    if config.distill.teacher is None or not isinstance(model, DistilledGPT):
        return
    path = folder_to_load(config.distill.teacher)
    checkpoint = open_model(path, key=key_for(path, config.checkpoint))
    if checkpoint.model.family != "gpt":
        raise InputError(f"{path}: the teacher is a {checkpoint.model.family}, not GPT-like.")
    shape = replace(
        GPTConfig.from_record(checkpoint.config),
        make_vocab_size_divisible_by=config.model.make_vocab_size_divisible_by,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    teacher = GPT(
        shape,
        groups,
        dtype=parameter_dtype(config),
        device="meta",
        execution=Execution(sequence_parallel=config.parallel.sequence_parallel),
    )
    teacher.to_empty(device=next(model.parameters()).device)
    fill(teacher, checkpoint)
    try:
        model.set_teacher(teacher, config.distill.loss)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error


def set_teaching(model: nn.Module, config: TrainConfig, *, step: int) -> None:
    """Ask the teacher in this step, or no more."""
    if isinstance(model, DistilledGPT):
        last = config.distill.until_step
        model.teaching = last is None or step <= last
