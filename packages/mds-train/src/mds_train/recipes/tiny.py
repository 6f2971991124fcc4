"""A recipe made so small that a laptop trains it: the same kinds of layers, few and narrow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mds_train.config.loading import Setting, Settings

__all__ = ["tiny"]

_ORIGIN = "made tiny"
_LAYERS, _HEADS, _HEAD_DIM, _SEQUENCE = 4, 4, 16, 64


def tiny(settings: Settings) -> Settings:
    """Settings of a model of some 100 thousand parameters on one rank.

    Precision, activation, positions, experts and recomputation stay; sizes, length, batch and
    layout shrink.
    """
    values = {key: setting.value for key, setting in settings.items()}
    small = _model(values) | _run(values)
    kept = {key: setting for key, setting in settings.items() if key not in _DROPPED}
    return {**kept, **{key: Setting(value=value, origin=_ORIGIN) for key, value in small.items()}}


_DROPPED = frozenset(
    {
        "parallel.ep_size",
        "parallel.partition",
        "parallel.pp_size",
        "parallel.schedule",
        "parallel.tp_size",
        "parallel.ulysses_size",
        "parallel.virtual_stages",
        "parallel.sequence_parallel",
        "schedule.decay_steps",
        "checkpoint.save_interval",
        "checkpoint.load",
        "watch.eval_interval",
        "data.split",
    }
)


def _model(values: Mapping[str, Any]) -> dict[str, Any]:
    model: dict[str, Any] = {
        "model.num_layers": _LAYERS,
        "model.hidden_size": _HEADS * _HEAD_DIM,
        "model.num_attention_heads": _HEADS,
        "model.max_position_embeddings": _SEQUENCE,
        "model.vocab_size": 256,
    }
    if "model.head_dim" in values:
        model["model.head_dim"] = _HEAD_DIM
    if "model.decoder_num_layers" in values:
        model["model.decoder_num_layers"] = _LAYERS // 2
    if "model.num_key_value_heads" in values:
        model["model.num_key_value_heads"] = _HEADS // 2
    if "model.ffn_hidden_size" in values:
        model["model.ffn_hidden_size"] = 2 * _HEADS * _HEAD_DIM
    if values.get("model.num_experts"):
        model["model.num_experts"] = 4
    if values.get("model.layer_experts"):
        model["model.layer_experts"] = (0, 2, 0, 4)
    return model


def _run(values: Mapping[str, Any]) -> dict[str, Any]:
    run: dict[str, Any] = {
        "data.seq_length": _SEQUENCE,
        "train.train_steps": 2,
        "train.global_batch_size": 4,
        "train.micro_batch_size": 2,
        "schedule.warmup_steps": 1,
        "watch.log_interval": 1,
    }
    if "data.decoder_seq_length" in values:
        run["data.decoder_seq_length"] = _SEQUENCE // 2
    if "data.curriculum_start_length" in values:
        run |= {"data.curriculum_start_length": 32, "data.curriculum_steps": 2}
    return run
