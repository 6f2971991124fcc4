"""Builds the model of a run as its configuration says: shape, layout, precision, recomputation."""

from __future__ import annotations

import logging

import torch

from mds_core.config import Execution
from mds_core.groups import ProcessGroups
from mds_core.models import GPT
from mds_train.config import TrainConfig

__all__ = ["build_model", "execution_of", "parameter_dtype"]

logger = logging.getLogger(__name__)


def build_model(config: TrainConfig, groups: ProcessGroups, *, device: torch.device) -> GPT:
    """The model of a run with its start values, on this rank's place in the layout."""
    if config.parallel.sequence_parallel and groups.tp_size == 1:
        logger.warning(
            "parallel.sequence_parallel does nothing: parallel.tp_size is 1, so nobody shares."
        )
    return GPT(
        config.model.core(),
        groups,
        seed=config.train.seed,
        dtype=parameter_dtype(config),
        device=device,
        execution=execution_of(config),
    )


def execution_of(config: TrainConfig) -> Execution:
    """How the model computes."""
    memory = config.memory
    return Execution(
        sequence_parallel=config.parallel.sequence_parallel,
        recompute=memory.recompute,  # type: ignore[arg-type]
        recompute_layers=memory.recompute_layers,
    )


def parameter_dtype(config: TrainConfig) -> torch.dtype:
    """What the model computes with."""
    return _DTYPES[config.train.precision]


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
