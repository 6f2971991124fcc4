"""The settings of a fine-tuning: the model from its checkpoint, the length from its data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mds_ckpt import Checkpoint, KeySource
from mds_train.config.data import DataConfig
from mds_train.config.keys import KEY_FIELDS
from mds_train.config.loading import Setting, Settings, build
from mds_train.config.model import ModelConfig
from mds_train.data.building import Stores, epoch_lengths, open_stores
from mds_train.errors import InputError
from mds_train.model_source import folder_to_load, open_model

__all__ = ["key_in", "settings_of_base", "with_data"]

_LONGEST = 2048
_WARMUP = 0.03
_ALL = "100,0,0"
_ADAPTERS_RATE = 2e-4
"""Adapters take larger steps than whole models."""
_DEFAULT = "finetune's default"
_DEFAULTS: Mapping[str, Any] = {
    "train.global_batch_size": 16,
    "train.micro_batch_size": 1,
    "optimizer.lr": 2e-5,
    "optimizer.weight_decay": 0.0,
}


def key_in(settings: Settings) -> KeySource | None:
    """What opens an encrypted model, if the [checkpoint] table names it."""
    named = {
        field: settings[f"checkpoint.{field}"].value
        for field in KEY_FIELDS
        if f"checkpoint.{field}" in settings
    }
    return KeySource(**named) if any(named.values()) else None


def settings_of_base(
    base: Path, store: Path, run_dir: Path, *, key: KeySource | None = None
) -> Settings:
    """What a checkpoint says of a fine-tuning, and usual values for the rest.

    Args:
        base: A checkpoint of any format that mds_ckpt opens, or the folder of a run.
        store: Conversations (`mds-data preprocess-sft`) or texts.
        run_dir: The new run.
        key: Opens an encrypted checkpoint.

    Raises:
        InputError: If the checkpoint does not hold a GPT-like model.
    """
    path = folder_to_load(str(base))
    model = _model(open_model(path, key=key))
    said = {f"model.{name}": value for name, value in _changed(model).items()}
    data = {
        "data.store": str(store),
        "data.seq_length": min(model.max_position_embeddings, _LONGEST),
        "checkpoint.load": str(path),
        "checkpoint.load_weights_only": True,
        "train.run_dir": str(run_dir),
    }
    return {
        **{key: _said(value, by=_DEFAULT) for key, value in _DEFAULTS.items()},
        **{key: _said(value, by=f"the model in {base}") for key, value in said.items()},
        **{key: _said(value, by="command line") for key, value in data.items()},
    }


def with_data(settings: Settings, *, epochs: float) -> Settings:
    """The same, with what the stores say: whether they hold conversations, and the steps.

    Adapters get a learning rate of their own where none was set.

    Args:
        settings: All others.
        epochs: Passes over the training samples, where train.train_steps is not set.
    """
    rate = settings.get("optimizer.lr")
    adapts = "lora.rank" in settings and settings["lora.rank"].value
    if adapts and rate is not None and rate.origin == _DEFAULT:
        settings = {**settings, "optimizer.lr": _said(_ADAPTERS_RATE, by=f"{_DEFAULT} for LoRA")}
    probe = {
        **settings,
        "train.train_steps": _said(1, by="the counting of samples"),
        "schedule.warmup_steps": _said(0, by="the counting of samples"),
    }
    config = build(probe)
    stores = open_stores(config)
    try:
        config = replace(config, data=_data(config.data, stores, settings))
        samples = sum(epoch_lengths(config, stores))
    finally:
        stores.close()
    steps = max(1, math.ceil(epochs * samples / config.train.global_batch_size))
    steps = settings["train.train_steps"].value if "train.train_steps" in settings else steps
    by = f"{steps} steps, {samples} samples an epoch"
    found = {
        "data.conversations": _said(config.data.conversations, by="the stores"),
        "train.train_steps": _said(steps, by=by),
        "schedule.warmup_steps": _said(int(_WARMUP * steps), by=by),
    }
    if config.data.split is not None:
        found["data.split"] = _said(config.data.split, by="the stores, which have no split")
    return {**found, **settings}


def _data(data: DataConfig, stores: Stores, settings: Settings) -> DataConfig:
    """With what is not set taken from the stores."""
    if "data.conversations" not in settings:
        data = replace(data, conversations=all(s.has_sentences for s in stores.training))
    if data.split is None and any(s.manifest.split is None for s in stores.training):
        data = replace(data, split=_ALL)
    return data


def _said(value: Any, *, by: str) -> Setting:
    return Setting(value=value, origin=by)


def _model(checkpoint: Checkpoint) -> ModelConfig:
    if checkpoint.model.family in ("bert", "t5"):
        raise InputError(
            f"{checkpoint.path}: it holds a {checkpoint.model.family}, and `finetune` is for "
            f"GPT-like models; write a configuration with checkpoint.load and use `mds-train run`."
        )
    try:
        return ModelConfig.from_record(checkpoint.config)
    except TypeError as error:
        raise InputError(
            f"{checkpoint.path}: it does not say all of its model ({error}); convert it with "
            f"`mds-ckpt convert --to mds` first."
        ) from error


def _changed(model: ModelConfig) -> dict[str, Any]:
    """Fields that are not at their defaults."""
    return {
        field.name: getattr(model, field.name)
        for field in dataclasses.fields(model)
        if getattr(model, field.name) != field.default
    }
