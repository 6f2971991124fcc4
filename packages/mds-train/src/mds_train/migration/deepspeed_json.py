"""What DeepSpeed's JSON says, in our settings; the rest with the reason why it is not carried."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mds_train.errors import InputError

__all__ = ["JsonFindings", "parse_json", "read_deepspeed_json", "read_settings_text"]

_LARGEST_FILE = 2**22

_IDLE = {
    "gradient_accumulation_steps": "it follows from the batch sizes",
    "steps_per_print": "watch.log_interval says how often a line is shown",
    "wall_clock_breakdown": "metrics.jsonl holds the seconds of every step",
    "prescale_gradients": "the loss carries its weight, so gradients are only summed",
    "gradient_predivide_factor": "the loss carries its weight, so gradients are only summed",
    "optimizer": "the original builds its optimizer from its flags, and so does this",
    "scheduler": "the original builds its schedule from its flags, and so does this",
    "communication_data_type": "gradients are summed over the ranks in fp32",
    "data_types": "gradients are summed in fp32",
    "zero_allow_untested_optimizer": "the optimizer is tested",
    "zero_force_ds_cpu_optimizer": "the engine chooses",
    "flops_profiler": "the console shows FLOP/s",
    "activation_checkpointing": "[memory] says what is computed again",
    "tensorboard": "TensorBoard is always written",
    "csv_monitor": "metrics.jsonl is always written",
    "monitor_config": "metrics.jsonl is always written",
    "comms_logger": "the profiler shows communication",
    "dump_state": "config.toml holds all settings",
    "aio": "nothing is read or written by it here",
    "checkpoint": "checkpoints have one format, whatever the layout is",
    "seed": "train.seed comes from --seed",
}
_LEFT_OUT = {
    "compression_training": "compression is not trained here",
    "data_efficiency": "of it, only curriculum by sequence length is here (data.curriculum_*)",
    "elasticity": "a run resumes on any number of ranks; start it again with another one",
    "autotuning": "choose batch size and layout with `mds-train run --dry-run`",
    "sparse_attention": "attention is dense here",
    "amp": "use bf16 (train.precision)",
    "wandb": "--wandb-project sends the metrics to Weights & Biases",
}
_LARGEST_POWER = 64
_ZERO_KNOWN = frozenset(
    (
        "allgather_bucket_size",
        "allgather_partitions",
        "contiguous_gradients",
        "elastic_checkpoint",
        "gather_16bit_weights_on_model_save",
        "ignore_unused_parameters",
        "load_from_fp32_weights",
        "overlap_comm",
        "reduce_bucket_size",
        "reduce_scatter",
        "round_robin_gradients",
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_param_persistence_threshold",
        "stage3_prefetch_bucket_size",
        "sub_group_size",
    )
)


@dataclass(kw_only=True, slots=True)
class JsonFindings:
    """What became of a DeepSpeed JSON.

    Attributes:
        settings: Value by our key.
        places: Where in the JSON each stands.
        idle: Sentences on what does nothing here.
        left_out: Sentences on what was not carried.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def put(self, key: str, value: Any, *, place: str) -> None:
        """Take a value over."""
        self.settings[key] = value
        self.places[key] = place


def read_settings_text(path: Path) -> str:
    """Read a file of settings or arguments as text.

    Raises:
        InputError: If there is none, or it has over 4 MiB.
    """
    if not path.is_file():
        raise InputError(f"{path}: there is no such file; check the path.")
    if path.stat().st_size > _LARGEST_FILE:
        raise InputError(f"{path}: it has more than {_LARGEST_FILE} bytes, as no settings have.")
    return path.read_text(encoding="utf-8", errors="replace")


def parse_json(text: str, *, name: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        InputError: If it is none.
    """
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(
            f"{name}: no valid JSON ({error}); correct it, or leave it out."
        ) from error
    if not isinstance(document, dict):
        raise InputError(f"{name}: DeepSpeed's settings are a JSON object, but this is not one.")
    return document


def read_deepspeed_json(document: Mapping[str, Any]) -> JsonFindings:
    """Turn DeepSpeed's settings into ours."""
    findings = JsonFindings()
    # Without this key DeepSpeed clips nothing, whatever --clip-grad says.
    clipping = document.get("gradient_clipping", 0.0)
    _number(findings, "train.gradient_clipping", clipping, place="gradient_clipping")
    for key, value in document.items():
        if key in _READERS:
            _READERS[key](findings, value)
        elif key in _IDLE:
            findings.idle.append(f"{key} does nothing here: {_IDLE[key]}.")
        elif key in _LEFT_OUT:
            if not (isinstance(value, dict) and value.get("enabled") is False):
                findings.left_out.append(f"{key}: {_LEFT_OUT[key]}.")
        elif key != "gradient_clipping":
            findings.left_out.append(f"{key}: no setting of that name is known here.")
    return findings


def _number(findings: JsonFindings, key: str, value: Any, *, place: str) -> None:
    if value == "auto":
        findings.left_out.append(f'{place}: "auto" is for other trainers; write a number.')
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        findings.left_out.append(f"{place}: {value!r} is no number.")
    else:
        findings.put(key, value, place=place)


def _counted(key: str, place: str) -> Callable[[JsonFindings, Any], None]:
    return lambda findings, value: _number(findings, key, value, place=place)


def _precision(name: str) -> Callable[[JsonFindings, Any], None]:
    def read(findings: JsonFindings, value: Any) -> None:
        if not isinstance(value, dict) or value.get("enabled") not in (True, "true"):
            return
        findings.put("train.precision", name, place=f"{name}.enabled")
        for key, inner in value.items():
            if key in _LOSS_SCALE:
                _loss_scale(findings, key, inner)
            elif key not in (
                "enabled",
                "auto_cast",
                "check_grad_overflow",
                "immediate_grad_update",
            ):
                findings.left_out.append(f"{name}.{key}: no setting of that name is known here.")

    return read


_LOSS_SCALE = {
    "loss_scale": "fp16.loss_scale",
    "initial_scale_power": "fp16.initial_scale",
    "loss_scale_window": "fp16.window",
    "hysteresis": "fp16.hysteresis",
    "min_loss_scale": "fp16.min_scale",
}


def _loss_scale(findings: JsonFindings, key: str, value: Any) -> None:
    """DeepSpeed's loss scale: 0 is a dynamic one, and its start is a power of two."""
    if key == "loss_scale" and not value:
        return
    if key == "initial_scale_power" and isinstance(value, int) and 0 <= value <= _LARGEST_POWER:
        value = 2.0**value
    _number(findings, _LOSS_SCALE[key], value, place=f"fp16.{key}")


def _zero(findings: JsonFindings, value: Any) -> None:
    if not isinstance(value, dict):
        findings.left_out.append(f"zero_optimization: {value!r} is no object.")
        return
    for key, inner in value.items():
        if key == "stage":
            _number(findings, "parallel.zero_stage", inner, place="zero_optimization.stage")
        elif key in _OFFLOADS:
            _offload(findings, key, inner)
        elif key in _ZERO_KNOWN:
            findings.idle.append(
                f"zero_optimization.{key} does nothing here: the engine chooses its buffers, which "
                f"changes no result."
            )
        else:
            findings.left_out.append(
                f"zero_optimization.{key}: look at [memory] and [parallel] for what is there "
                f"instead (`mds-train run --help`)."
            )


_OFFLOADS = {
    "offload_optimizer": "memory.offload_optimizer",
    "offload_param": "memory.offload_parameters",
    "cpu_offload": "memory.offload_optimizer",
    "cpu_offload_params": "memory.offload_parameters",
}


def _offload(findings: JsonFindings, key: str, value: Any) -> None:
    """What ZeRO moves off the device; the two old names are true or false."""
    place = f"zero_optimization.{key}"
    if key.startswith("cpu_"):
        findings.put(_OFFLOADS[key], "cpu" if value is True else "none", place=place)
        return
    if not isinstance(value, dict):
        findings.left_out.append(f"{place}: {value!r} is no object.")
        return
    device = value.get("device", "none")
    if device not in ("none", "cpu"):
        findings.left_out.append(
            f'{place}.device: "{device}" is not here, since no checkpoint could be written from '
            f'there; {_OFFLOADS[key]} = "cpu" keeps it in the host\'s memory.'
        )
        return
    findings.put(_OFFLOADS[key], device, place=f"{place}.device")
    if device == "cpu" and value.get("ratio", 1.0) != 1.0:
        _number(findings, "memory.offload_ratio", value["ratio"], place=f"{place}.ratio")
    idle = sorted(set(value) - {"device", "ratio"})
    if idle:
        findings.idle.append(f"{place}: {', '.join(idle)} do nothing here: they change no result.")


def _curriculum(findings: JsonFindings, value: Any) -> None:
    if not isinstance(value, dict) or not value.get("enabled"):
        return
    schedule = value.get("schedule_config", {})
    roots = {"fixed_linear": 1, "fixed_root": schedule.get("root_degree", 2)}
    kind, form = value.get("curriculum_type", "seqlen"), value.get("schedule_type")
    if kind != "seqlen" or form not in roots:
        findings.left_out.append(
            f"curriculum_learning: {kind} by {form} is not here; samples grow by fixed_linear or "
            f"fixed_root (data.curriculum_*)."
        )
        return
    taken = {
        "start_length": value.get("min_difficulty"),
        "steps": schedule.get("total_curriculum_step"),
        "multiple": schedule.get("difficulty_step"),
        "root": roots[form],
    }
    for name, number in taken.items():
        _number(findings, f"data.curriculum_{name}", number, place=f"curriculum_learning.{name}")


_READERS: Mapping[str, Callable[[JsonFindings, Any], None]] = {
    "train_batch_size": _counted("train.global_batch_size", "train_batch_size"),
    "train_micro_batch_size_per_gpu": _counted(
        "train.micro_batch_size", "train_micro_batch_size_per_gpu"
    ),
    "zero_optimization": _zero,
    "bf16": _precision("bf16"),
    "bfloat16": _precision("bf16"),
    "fp16": _precision("fp16"),
    "curriculum_learning": _curriculum,
}
