"""Time, traffic and disk of a run, from its FLOPs, its schedule and a machine's data sheet.

The share of the peak that the matrix products reach is given, not guessed: it depends on sizes and
libraries, and `mds-train report` measures it. Communication is listed, not added to the time; what
of it hides behind computation depends on the network.
"""

from __future__ import annotations

from dataclasses import dataclass

from mds_core.pipeline.simulation import Times, simulate
from mds_train.config import TrainConfig
from mds_train.plan.machines import Machine

__all__ = ["SpeedPlan", "Traffic", "plan_speed", "plan_traffic"]

_SECONDS_A_DAY = 86_400


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedPlan:
    """How long it takes."""

    flops_per_token: float
    """Forward and backward, as the model needs them."""
    hardware_flops_per_token: float
    """With what is computed again."""
    bubble_share: float
    """Share of the time in which a pipeline rank waits for others."""
    step_seconds: float
    tokens_per_day: float
    days: float
    """Of the whole run."""
    utilisation: float
    """Model FLOPs over peak (MFU), bubble and recomputation taken off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that one rank sends in one step for one purpose."""

    what: str
    bytes: int
    inside_node: bool
    seconds: float
    """At the data sheet's bandwidth, if nothing hid it."""


def plan_speed(
    config: TrainConfig, *, world_size: int, machine: Machine, efficiency: float
) -> SpeedPlan:
    """Estimate the time of a step and of the run.

    Args:
        config: The run.
        world_size: Number of ranks.
        machine: The accelerator.
        efficiency: Share of the peak that computation reaches while it runs.
    """
    train, length = config.train, config.data.seq_length
    flops = config.model.flops_per_token(length)
    hardware = flops * _recomputed(config)
    bubble = _bubble(config, world_size=world_size)
    tokens = train.global_batch_size * length
    peak = world_size * machine.teraflops * 1e12
    seconds = tokens * hardware / (peak * efficiency * (1 - bubble))
    return SpeedPlan(
        flops_per_token=flops,
        hardware_flops_per_token=hardware,
        bubble_share=bubble,
        step_seconds=seconds,
        tokens_per_day=tokens / seconds * _SECONDS_A_DAY,
        days=train.train_steps * seconds / _SECONDS_A_DAY,
        utilisation=tokens * flops / (seconds * peak),
    )


def _recomputed(config: TrainConfig) -> float:
    """Forward passes computed twice: a third more FLOPs if all are."""
    if config.memory.recompute == "full":
        return 4 / 3
    if config.memory.recompute == "none":
        return 1.0
    model, length = config.model, config.data.seq_length
    attention = 6 * model.num_layers * model.num_attention_heads * model.channels * length
    return 1 + attention / 3 / model.flops_per_token(length)


def _bubble(config: TrainConfig, *, world_size: int) -> float:
    parallel, train = config.parallel, config.train
    if parallel.pp_size == 1:
        return 0.0
    count = train.global_batch_size // (train.micro_batch_size * parallel.dp_size(world_size))
    if parallel.pipeline_schedule in ("gpipe", "1f1b"):
        return (parallel.pp_size - 1) / (count + parallel.pp_size - 1)  # Narayanan et al. 2021
    again = 1.0 if config.memory.recompute == "full" else 0.0
    return simulate(
        parallel.pipeline_schedule,
        pp_size=parallel.pp_size,
        micro_batches=count,
        times=Times(input_gradient=1 + again),
        chunks=parallel.stage_count // parallel.pp_size,
    ).bubble_share


def plan_traffic(config: TrainConfig, *, world_size: int, machine: Machine) -> list[Traffic]:
    """What one rank sends in one step, by purpose; ring algorithms."""
    train, parallel = config.train, config.parallel
    model, value = config.model, 4 if config.train.precision == "fp32" else 2
    replicas = parallel.dp_size(world_size)
    count = train.global_batch_size // (train.micro_batch_size * replicas)
    hidden = (
        train.micro_batch_size
        * (config.data.seq_length // parallel.ulysses_size)
        * model.hidden_size
        * value
    )
    layers = -(-model.num_layers // parallel.pp_size)
    parameters = model.num_params() // (parallel.tp_size * parallel.pp_size)
    sharers = replicas * parallel.ulysses_size
    ring = (sharers - 1) / sharers
    tp = (parallel.tp_size - 1) / parallel.tp_size
    gathers = 2 * count if parallel.zero_stage == 3 else int(parallel.zero_stage > 0)
    beside = parallel.tp_size * parallel.ulysses_size
    sizes = (
        # Two all-reduces a layer forward and two backward; a ring sends twice its part of each.
        ("tensor parallel: activations", 8 * tp * layers * hidden * count, parallel.tp_size),
        ("Ulysses: heads and positions", 8 * layers * hidden * count, beside),
        ("pipeline: activations and gradients", 2 * hidden * count, world_size),
        (
            "data parallel: gradients",
            (2 if gathers == 0 else 1) * ring * 4 * parameters,
            world_size,
        ),
        ("data parallel: weights", gathers * ring * value * parameters, world_size),
    )
    used = {
        "tensor parallel: activations": parallel.tp_size > 1,
        "Ulysses: heads and positions": parallel.ulysses_size > 1,
        "pipeline: activations and gradients": parallel.pp_size > 1,
        "data parallel: gradients": sharers > 1,
        "data parallel: weights": sharers > 1 and gathers > 0,
    }
    return [
        _traffic(what, round(size), reach=reach, machine=machine)
        for what, size, reach in sizes
        if used[what]
    ]


def _traffic(what: str, size: int, *, reach: int, machine: Machine) -> Traffic:
    inside = reach <= machine.per_node
    speed = machine.node_gigabytes if inside else machine.network_gigabytes
    return Traffic(what=what, bytes=size, inside_node=inside, seconds=size / (speed * 1e9))
