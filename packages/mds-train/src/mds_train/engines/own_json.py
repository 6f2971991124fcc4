"""A DeepSpeed JSON of the user's own: compared with the derived one key by key, then merged.

The other tables stay the only source of what is computed: a key that says something else than they
do is an error that names the field to change. Keys that choose buffers or reports are passed on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mds_train.config import TrainConfig
from mds_train.engines.deepspeed_config import deepspeed_config
from mds_train.errors import InputError
from mds_train.migration.deepspeed_json import (
    parse_json,
    read_deepspeed_json,
    read_settings_text,
)

__all__ = ["check_own_json", "merged_json", "with_own_json", "zero_settings"]

logger = logging.getLogger(__name__)

_OFFLOAD = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"

PASSED_ON = frozenset(
    (
        "aio",
        "comms_logger",
        "dump_state",
        "flops_profiler",
        "memory_breakdown",
        "steps_per_print",
        "wall_clock_breakdown",
        *(
            f"zero_optimization.{key}"
            for key in (
                "allgather_bucket_size",
                "allgather_partitions",
                "ignore_unused_parameters",
                "load_from_fp32_weights",
                "reduce_bucket_size",
                "stage3_gather_16bit_weights_on_model_save",
                "stage3_max_live_parameters",
                "stage3_max_reuse_distance",
                "stage3_param_persistence_threshold",
                "stage3_prefetch_bucket_size",
                "sub_group_size",
                "use_multi_rank_bucket_allreduce",
            )
        ),
        *(f"{place}.{key}" for place in _OFFLOAD for key in ("buffer_count", "pin_memory")),
        f"{_OFFLOAD[1]}.buffer_size",
        f"{_OFFLOAD[1]}.max_in_cpu",
    )
)
"""Keys that change no result; DeepSpeed gets them as they are, with all that is inside them."""

_FIELDS = {
    "communication_data_type": "nothing: gradients are summed over the ranks in fp32",
    "data_types.grad_accum_dtype": "nothing: gradients are summed in fp32",
    "gradient_accumulation_steps": (
        "train.global_batch_size, train.micro_batch_size or the number of ranks"
    ),
    "prescale_gradients": "nothing: the loss carries its weight, so gradients are only summed",
    "zero_optimization.contiguous_gradients": "nothing: the engine chooses it by device",
    "zero_optimization.overlap_comm": "nothing: the engine chooses it by device",
}
_BY_DEVICE = frozenset(key for key, field in _FIELDS.items() if field.endswith("by device"))
_REFUSED = {
    "scheduler": "the [schedule] table says how the learning rate moves",
    "amp": "train.precision says what is computed in",
    "elasticity": "a run resumes on any number of ranks",
    "curriculum_learning": "data.curriculum_* grow the samples",
    "data_efficiency": "data.curriculum_* grow the samples",
    "wandb": "watch.trackers sends metrics to Weights & Biases",
    "tensorboard": "TensorBoard is always written",
    "csv_monitor": "metrics.jsonl is always written",
    "checkpoint": "checkpoints have one format",
    "activation_checkpointing": "[memory] says what is computed again",
}
_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "lion": "lion", "muon": "muon", "sgd": "sgd"}


def check_own_json(config: TrainConfig, *, world_size: int) -> None:
    """Look for contradictions before anything is started.

    Raises:
        InputError: As `with_own_json`.
    """
    dp_size = config.parallel.dp_size(world_size)
    replicas, on_cpu = dp_size * config.parallel.ulysses_size, config.train.device == "cpu"
    derived = deepspeed_config(config, dp_size=dp_size, replicas=replicas, on_cpu=on_cpu)
    with_own_json(derived, config=config)


def with_own_json(derived: Mapping[str, Any], *, config: TrainConfig) -> dict[str, Any]:
    """The derived JSON together with the one that engine.deepspeed_config names, if it does.

    Raises:
        InputError: If that is not there, is no JSON object, or contradicts the configuration.
    """
    name = config.engine.deepspeed_config
    if name is None:
        return dict(derived)
    path = Path(name)
    if not path.is_file():
        raise InputError(f"{name}: there is no such file (engine.deepspeed_config); check it.")
    text = read_settings_text(path)
    merged, passed = merged_json(
        parse_json(text, name=name), derived=derived, config=config, name=name
    )
    for key, value in passed.items():
        logger.info("%s: %s = %s is passed on to DeepSpeed.", name, key, value)
    return merged


def zero_settings(config: TrainConfig) -> dict[str, Any]:
    """What the JSON that engine.deepspeed_config names says of ZeRO, unchecked; {} without one."""
    name = config.engine.deepspeed_config
    if name is None or not Path(name).is_file():
        return {}
    given = parse_json(Path(name).read_text(encoding="utf-8", errors="replace"), name=name)
    said = given.get("zero_optimization")
    return dict(said) if isinstance(said, dict) else {}


def merged_json(
    own: Mapping[str, Any], *, derived: Mapping[str, Any], config: TrainConfig, name: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Check a JSON and put what it adds into the derived one.

    Returns:
        The JSON for DeepSpeed, and what was added, by dotted key.

    Raises:
        InputError: Listing all keys that contradict the configuration.
    """
    given = _without_auto(own)
    complaints = [*_contradictions(given, config), *_optimizer_complaints(given, config)]
    passed: dict[str, Any] = {}
    ours, translated = dict(_leaves(derived)), _translated()
    for key, value in _leaves(given):
        if key in PASSED_ON or (key in _BY_DEVICE and key not in ours):
            passed[key] = value
        elif key in translated or key.startswith("optimizer."):
            continue
        elif key in ours and not _same(ours[key], value):
            field = _FIELDS.get(key)
            advice = f"change {field}" if field else "take it out"
            complaints.append(f"{key} is {value!r}, but {ours[key]!r} follows here; {advice}")
        elif key not in ours and not _says_no(value):
            why = _REFUSED.get(key.partition(".")[0], "it is not known to change no result")
            complaints.append(f"{key} is {value!r}, which is not passed on: {why}")
    if complaints:
        raise InputError(
            f"{name} (engine.deepspeed_config) contradicts the configuration: "
            f"{'; '.join(complaints)}."
        )
    return _merge(derived, passed), passed


def _contradictions(given: Mapping[str, Any], config: TrainConfig) -> Iterator[str]:
    """Keys that have a field here, and say something else."""
    findings = read_deepspeed_json(given)
    for key, value in findings.settings.items():
        place = findings.places[key]
        if place.partition(".")[0] not in given:
            continue  # what DeepSpeed takes an absent key for
        table, _, field = key.partition(".")
        ours = getattr(getattr(config, table), field)
        if not _same(ours, value):
            yield f"{place} is {_at(given, place)!r}, but {key} is {ours!r}; change one of them"
    for precision in ("bf16", "fp16"):
        enabled = _at(given, f"{precision}.enabled")
        if enabled is False and config.train.precision == precision:
            yield f'{precision}.enabled is False, but train.precision is "{precision}"'


def _translated() -> frozenset[str]:
    """Keys that have a field here, so that the field is what they were compared with."""
    precision = [f"{name}.{key}" for name in ("bf16", "fp16", "bfloat16") for key in _PRECISION]
    zero = ("stage", "offload_optimizer.device", "offload_optimizer.ratio", "offload_param.device")
    return frozenset(
        (
            "gradient_clipping",
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            *precision,
            *(f"zero_optimization.{key}" for key in zero),
        )
    )


_PRECISION = (
    "enabled",
    "hysteresis",
    "initial_scale_power",
    "loss_scale",
    "loss_scale_window",
    "min_loss_scale",
)


def _optimizer_complaints(given: Mapping[str, Any], config: TrainConfig) -> Iterator[str]:
    """DeepSpeed's optimizer must be ours, since ours is the one that steps."""
    wanted, ours = given.get("optimizer"), config.optimizer
    if not isinstance(wanted, Mapping):
        return
    kind = str(wanted.get("type", "")).lower()
    if _OPTIMIZERS.get(kind) != ours.name:
        yield f'optimizer.type is "{wanted.get("type")}", but optimizer.name is "{ours.name}"'
    fields: dict[str, Any] = {
        "lr": ours.lr,
        "eps": ours.eps,
        "weight_decay": ours.weight_decay,
    }
    fields |= {"betas": [ours.beta1, ours.beta2], "momentum": ours.usual_momentum}
    fields |= {"adam_w_mode": True, "torch_adam": ours.implementation == "torch"}
    for key, value in (wanted.get("params") or {}).items():
        if key not in fields:
            yield f"optimizer.params.{key} is {value!r}, for which there is no field"
        elif not _same(fields[key], value):
            yield f"optimizer.params.{key} is {value!r}, but [optimizer] has {fields[key]!r}"


def _without_auto(value: Mapping[str, Any]) -> dict[str, Any]:
    """The same without what is left to the trainer, and without keys that say nothing."""
    return {
        key: _without_auto(inner) if isinstance(inner, Mapping) else inner
        for key, inner in value.items()
        if inner != "auto"
    }


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping) and f"{prefix}{key}" not in PASSED_ON:
            yield from _leaves(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner


def _at(value: Any, place: str) -> Any:
    for key in place.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _says_no(value: Any) -> bool:
    """Something is switched off that is off here anyway."""
    return value is None or value is False or value in ("none", "false")


def _same(ours: Any, value: Any) -> bool:
    if isinstance(ours, bool) or isinstance(value, bool):
        return bool(ours == {"true": True, "false": False}.get(str(value).lower(), value))
    if isinstance(ours, (list, tuple)) and isinstance(value, (list, tuple)):
        return list(map(float, ours)) == list(map(float, value))
    return bool(ours == value)


def _merge(derived: Mapping[str, Any], passed: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(derived)
    for place, value in passed.items():
        *folders, last = place.split(".")
        inner: dict[str, Any] = merged
        for folder in folders:
            inner[folder] = dict(inner.get(folder) or {})
            inner = inner[folder]
        inner[last] = value
    return merged
