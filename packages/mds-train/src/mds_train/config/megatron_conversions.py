"""What the values of the original's flags become here: other units, several fields, other words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mds_train.config.batch_growth import BatchSizes
from mds_train.errors import UsageError

__all__ = [
    "BATCH",
    "TOKENS",
    "blend",
    "experts",
    "numbers_of",
    "of_tokens",
    "partition",
    "ramp",
    "residual",
    "seconds_text",
    "steps_of_samples",
    "timing",
    "virtual_stages",
    "wandb",
    "warmup_steps",
    "whole_text",
]

BATCH = ("train.global_batch_size", "train.rampup_batch_size?")
TOKENS = (*BATCH, "data.seq_length")


def whole_text(text: str) -> str:
    """The original's ``--zero-stage`` is a float."""
    return text.removesuffix(".0")


def seconds_text(text: str) -> str:
    """Minutes as seconds."""
    try:
        return str(60 * float(text))
    except ValueError:
        return text


def _sizes(batch: int, ramp: Sequence[int] | None) -> BatchSizes:
    start, increment, samples = ramp or (batch, 1, 0)
    return BatchSizes(final=batch, start=start, increment=increment, ramp_samples=samples)


def steps_of_samples(samples: float, batch: int, ramp: Sequence[int] | None) -> int:
    """Steps that consume so many samples; at least one."""
    steps = _sizes(batch, ramp).steps_for(int(samples))
    if steps < 1:
        raise UsageError(
            f"{int(samples)} samples are less than one global batch of {batch}; give more samples "
            "or a smaller train.global_batch_size."
        )
    return steps


def warmup_steps(samples: float, batch: int, ramp: Sequence[int] | None) -> int:
    """The same for a warm-up, which may be none."""
    return _sizes(batch, ramp).steps_for(int(samples))


def of_tokens(
    compute: Callable[[float, int, Sequence[int] | None], int],
) -> Callable[[float, int, Sequence[int] | None, int], int]:
    """The same for a number of tokens."""
    return lambda tokens, batch, ramp, length: compute(tokens // length, batch, ramp)


def ramp(values: Sequence[str]) -> Mapping[str, Any]:
    """Read ``start increment samples``."""
    try:
        numbers = tuple(int(value) for value in values)
    except ValueError:
        numbers = ()
    if len(numbers) != 3:
        raise ValueError("takes three whole numbers: start, increment and samples")
    return {"train.rampup_batch_size": numbers}


def blend(prefix: str) -> Callable[[Sequence[str]], Mapping[str, Any]]:
    """Read ``path`` or ``weight path weight path``; what a file says of them is taken back."""

    def read(values: Sequence[str]) -> Mapping[str, Any]:
        weights, paths = _weights_and_paths(values)
        one: dict[str, Any] = {"data.store": None} if not prefix else {}
        if len(paths) == 1 and not prefix:
            return {"data.store": paths[0], "data.stores": (), "data.weights": ()}
        return one | {f"data.{prefix}stores": paths, f"data.{prefix}weights": weights}

    return read


def numbers_of(key: str) -> Callable[[Sequence[str]], Mapping[str, Any]]:
    """Read ``2,3`` or ``2 3``."""

    def read(values: Sequence[str]) -> Mapping[str, Any]:
        try:
            return {key: tuple(int(part) for value in values for part in value.split(",") if part)}
        except ValueError as error:
            raise ValueError("takes whole numbers") from error

    return read


def timing(values: Sequence[str]) -> Mapping[str, Any]:
    """Read the level of the timers."""
    if len(values) != 1 or values[0] not in ("0", "1", "2"):
        raise ValueError("takes 0, 1 or 2")
    return {"watch.timers": values[0] != "0"}


def wandb(values: Sequence[str]) -> Mapping[str, Any]:
    """Read a project of Weights & Biases, which may have several words."""
    if not values:
        raise ValueError("takes the name of a project")
    return {"watch.project": " ".join(values), "watch.trackers": ("wandb",)}


def _weights_and_paths(values: Sequence[str]) -> tuple[tuple[float, ...], tuple[str, ...]]:
    if not values:
        raise ValueError("takes a path, or weights and paths in turn")
    if len(values) == 1:
        return (), tuple(values)
    try:
        weights = tuple(float(value) for value in values[::2])
    except ValueError:
        return (), tuple(values)  # paths alone, as later versions of Megatron have it
    if len(values) % 2:
        raise ValueError("takes weights and paths in turn, but one path is missing")
    return (weights if len(weights) > 1 else ()), tuple(values[1::2])


def virtual_stages(layers: float, num_layers: int, pp_size: int) -> int:
    """Virtual stages of so many layers on each rank."""
    count, rest = divmod(num_layers, pp_size * max(int(layers), 1))
    if rest or layers < 1:
        raise UsageError(
            f"{int(layers)} layers a virtual stage do not divide model.num_layers {num_layers} on "
            f"parallel.pp_size {pp_size} ranks evenly; --parallel.virtual-stages N with "
            f"--parallel.partition takes uneven stages too."
        )
    return count


def partition(text: str) -> str:
    """A method of cutting a model into stages, in our words."""
    methods = {"uniform": "layers", "type:transformer": "layers", "parameters": "parameters"}
    if text.lower() not in methods:
        raise UsageError(
            f"--pp-partition-method is {text!r}, but only {', '.join(methods)} are taken over; "
            '--parallel.partition "3,5" says the number of layers of each stage.'
        )
    return methods[text.lower()]


def experts(
    counts: Sequence[float], num_layers: int, interval: int | None
) -> Mapping[str, int | tuple[int, ...] | None]:
    """Experts of all expert layers, or of each; 1 is an MLP for all tokens."""
    numbers, step = [int(count) for count in counts], interval or 1
    if len(numbers) == 1:
        return {"model.num_experts": None if numbers == [1] else numbers[0]}
    if len(numbers) != num_layers // step:
        raise UsageError(
            f"--num-experts names {len(numbers)} layers, but with model.expert_interval {step} "
            f"(--expert-interval) {num_layers // step} of {num_layers} layers have experts; give "
            f"one number for all of them, or one for each."
        )
    layers = (0 if (layer + 1) % step else numbers[layer // step] for layer in range(num_layers))
    return {"model.num_experts": None, "model.layer_experts": tuple(layers)}


def residual(text: str) -> str:
    """Whether an expert layer has an MLP beside its experts."""
    values = {"standard": "false", "residual": "true"}
    if text not in values:
        raise UsageError(f"--mlp-type is {text!r}, but it must be standard or residual.")
    return values[text]
