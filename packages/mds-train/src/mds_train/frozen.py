"""Fills weights that are not trained, beside which adapters are, from the model to adapt."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from mds_core.groups import ProcessGroups
from mds_core.models import GPT
from mds_core.pipeline import Pipeline
from mds_core.sharding import cut
from mds_train.config import TrainConfig
from mds_train.errors import InputError
from mds_train.exchange import attempt_on_all
from mds_train.generate.model import as_torch
from mds_train.model_building import Model, parameters_of
from mds_train.model_source import folder_to_load, open_model
from mds_train.saving.sealing import key_for

__all__ = ["fill_frozen"]

logger = logging.getLogger(__name__)


def fill_frozen(model: Model | Pipeline, config: TrainConfig, groups: ProcessGroups) -> None:
    """Read this rank's share of the weights that are not trained, if there are some. Collective.

    Raises:
        InputError: The checkpoint holds another model.
    """
    path = config.checkpoint.load
    if not config.lora.rank or path is None or not isinstance(model, (GPT, Pipeline)):
        return
    chosen = attempt_on_all(lambda: folder_to_load(path) if groups.rank == 0 else None)
    attempt_on_all(lambda: _fill(model, chosen[0], config))


@torch.no_grad()
def _fill(model: GPT | Pipeline, folder: Path | None, config: TrainConfig) -> None:
    assert folder is not None
    checkpoint = open_model(folder, key=key_for(folder, config.checkpoint))
    shards = model.parameter_shards()
    for name, parameter in parameters_of(model).items():
        if parameter.requires_grad:
            continue
        stored, shape = checkpoint.tensors.get(name), shards[name].global_shape
        if stored is None or tuple(stored.shape) != shape:
            there = "missing" if stored is None else list(stored.shape)
            raise InputError(
                f"{checkpoint.path}: {name} has the shape {there} there and {list(shape)} in this "
                f"model; make the [model] table that of the checkpoint (`mds-ckpt inspect` shows "
                f"it)."
            )
        parameter.copy_(cut(shards[name], as_torch(stored.numpy())))
    logger.info("The weights of %s stay as they are; adapters are trained.", checkpoint.path)
