"""Time of a step: what computes, what moves memory, what waits, and what is sent.

The model has two constants for each kind of accelerator, fitted on published runs (calibration.py):
the share of the peak that matrix products reach, and the share of the traffic that nothing hides.
Everything else is counted: FLOPs from the model, elementwise traffic with the memory from the
layer's kind, the bubble from the schedule, bytes sent from the layout.
"""

from __future__ import annotations

from dataclasses import dataclass

from mds_core.pipeline.simulation import Times, simulate
from mds_train.config import TrainConfig
from mds_train.plan.machines import Fitted, Machine

__all__ = ["SpeedPlan", "Traffic", "plan_speed", "plan_traffic"]

_SECONDS_A_DAY = 86_400
_VALUE = 2
"""Bytes of an activation in bf16 or fp16."""
_BESIDE_PRODUCTS = 24
"""Bytes a hidden value moves in a forward pass between the products: two norms, two residual sums
with dropout."""
_UNFUSED_SCORES = 10
"""Bytes an attention score moves in a forward pass without a fused kernel: scale, mask, softmax,
dropout."""
_ADAM = 30
"""Bytes a parameter moves in AdamW: gradient, master, two moments in; these and the weight out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedPlan:
    """How long it takes."""

    flops_per_token: float
    """Forward and backward, as the model needs them."""
    hardware_flops_per_token: float
    """With what is computed again."""
    bubble_share: float
    """Share of the time in which a pipeline rank waits for others."""
    product_seconds: float
    """Matrix products of a step, if they ran at the peak and nothing waited."""
    traffic_seconds: float
    """Everything sent in a step, if nothing hid it; see `plan_traffic`."""
    step_seconds: float
    tokens_per_day: float
    days: float
    """Of the whole run."""
    utilisation: float
    """Model FLOPs over peak (MFU), everything taken off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that one rank sends in one step for one purpose."""

    what: str
    bytes: int
    inside_node: bool
    seconds: float
    """At the data sheet's bandwidth, if nothing hid it."""


def plan_speed(
    config: TrainConfig,
    *,
    world_size: int,
    machine: Machine,
    fitted: Fitted | None = None,
    fused_attention: bool = True,
) -> SpeedPlan:
    """Estimate the time of a step and of the run.

    Args:
        config: The run.
        world_size: Number of ranks.
        machine: The accelerator.
        fitted: The two constants; None takes the machine's.
        fused_attention: False if all attention scores, masked ones too, are computed and go through
            the memory, as before 2022.
    """
    constants = fitted or machine.fitted
    train, length = config.train, config.data.tokens_of_sample
    flops = config.flops_per_token
    masked = 0.0 if fused_attention else _causal_attention(config)
    hardware = (flops + masked) * _recomputed(config)
    bubble = _bubble(config, world_size=world_size)
    tokens = train.global_batch_size * length
    peak = world_size * machine.teraflops * 1e12
    products = tokens * hardware / peak
    moved = _elementwise_seconds(config, world_size, machine, fused_attention=fused_attention)
    sent = sum(
        each.seconds for each in plan_traffic(config, world_size=world_size, machine=machine)
    )
    seconds = (
        (products / constants.efficiency + moved) / (1 - bubble)
        + _optimizer_seconds(config, world_size, machine)
        + constants.exposed * sent
    )
    return SpeedPlan(
        flops_per_token=flops,
        hardware_flops_per_token=hardware,
        bubble_share=bubble,
        product_seconds=products,
        traffic_seconds=sent,
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
    return 1 + _attention(config) / 3 / config.flops_per_token


def _causal_attention(config: TrainConfig) -> float:
    """FLOPs a token of the scores that a causal mask hides; a BERT and a T5's encoder have none."""
    return _attention(config) if config.model.family == "gpt" else 0.0


def _attention(config: TrainConfig) -> float:
    """FLOPs a token of the scores that a causal mask lets through."""
    model = config.model
    width = model.num_attention_heads * model.channels
    return 6.0 * model.num_layers * width * config.data.seq_length


def _bubble(config: TrainConfig, *, world_size: int) -> float:
    parallel = config.parallel
    if parallel.pp_size == 1:
        return 0.0
    count = _micro_batches(config, world_size)
    chunks = parallel.stage_count // parallel.pp_size
    if parallel.pipeline_schedule in ("gpipe", "1f1b", "interleaved-1f1b"):
        # Narayanan et al. 2021, sections 2.2.1 and 2.2.2.
        return (parallel.pp_size - 1) / (chunks * count + parallel.pp_size - 1)
    again = 1.0 if config.memory.recompute == "full" else 0.0
    return simulate(
        parallel.pipeline_schedule,
        pp_size=parallel.pp_size,
        micro_batches=count,
        times=Times(input_gradient=1 + again),
        chunks=chunks,
    ).bubble_share


def _micro_batches(config: TrainConfig, world_size: int) -> int:
    """Micro batches of a step on one replica."""
    train = config.train
    return train.global_batch_size // (train.micro_batch_size * config.parallel.dp_size(world_size))


def _elementwise_seconds(
    config: TrainConfig, world_size: int, machine: Machine, *, fused_attention: bool
) -> float:
    """Norms, sums, gates and scores of a rank's step, at the memory's bandwidth."""
    model, parallel = config.model, config.parallel
    length = config.data.seq_length // parallel.ulysses_size
    between = _BESIDE_PRODUCTS * model.hidden_size
    if parallel.sequence_parallel:
        between //= parallel.tp_size
    gate = _VALUE * (3 if model.gated else 2) * model.ffn_width
    scores = 0 if fused_attention else _UNFUSED_SCORES * model.num_attention_heads * length
    token_bytes = between + (gate + scores) // parallel.tp_size
    passes = 4 if config.memory.recompute == "full" else 3
    layers = model.num_layers / parallel.pp_size
    tokens = _micro_batches(config, world_size) * config.train.micro_batch_size * length
    return passes * token_bytes * layers * tokens / (machine.memory_gigabytes * 1e9)


def _optimizer_seconds(config: TrainConfig, world_size: int, machine: Machine) -> float:
    """The update of the parameters that a rank owns, at the memory's bandwidth."""
    parallel = config.parallel
    owned = config.model.num_params() / (parallel.tp_size * parallel.pp_size)
    if parallel.zero_stage:
        owned /= parallel.dp_size(world_size) * parallel.ulysses_size
    return _ADAM * owned / (machine.memory_gigabytes * 1e9)


def plan_traffic(config: TrainConfig, *, world_size: int, machine: Machine) -> list[Traffic]:
    """What one rank sends in one step, by purpose; ring algorithms."""
    train, parallel = config.train, config.parallel
    model, value = config.model, 4 if config.train.precision == "fp32" else 2
    replicas = parallel.dp_size(world_size)
    count = _micro_batches(config, world_size)
    position = train.micro_batch_size * model.hidden_size * value
    hidden = config.data.seq_length // parallel.ulysses_size * position
    # In a T5's decoder the encoder's output travels along.
    passed = hidden + (config.data.decoder_seq_length or 0) * position
    layers = -(-model.num_layers // parallel.pp_size)
    parameters = model.num_params() // (parallel.tp_size * parallel.pp_size)
    sharers = replicas * parallel.ulysses_size
    ring = (sharers - 1) / sharers
    tp = (parallel.tp_size - 1) / parallel.tp_size
    gathers = 2 * count if parallel.zero_stage == 3 else int(parallel.zero_stage > 0)
    beside = parallel.tp_size * parallel.ulysses_size
    # Two all-reduces a layer forward and two backward, and those of a second forward pass; a ring
    # sends twice its part of each.
    reduces = 12 if config.memory.recompute == "full" else 8
    sizes = (
        ("tensor parallel: activations", reduces * tp * layers * hidden * count, parallel.tp_size),
        ("Ulysses: heads and positions", 8 * layers * hidden * count, beside),
        ("pipeline: activations and gradients", 2 * passed * count, world_size),
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
