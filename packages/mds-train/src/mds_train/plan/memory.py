"""Memory of one rank, by part, for a configuration on so many ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mds_core.partition import parameter_costs
from mds_core.pipeline.schedule import schedule_named
from mds_core.pipeline.simulation import simulate
from mds_train.config import TrainConfig
from mds_train.model_building import global_shapes, stages
from mds_train.plan.activations import LayerCounter
from mds_train.plan.zero_memory import Counts, ZeroMemory

__all__ = ["MemoryPlan", "memory_by_stage", "plan_memory"]

_FP32, _HALF = 4, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes of the fullest rank, without what is kept in the host's memory."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Kept for the backward pass, of all micro batches under way."""
    head: int
    """Embedding output, and a chunk of logits with its gradient."""
    buffers: int = 0
    """DeepSpeed's beside the activations: weights gathered, gradients to be sent."""
    summing: int = 0
    """Its buffers and copies once the activations are gone, when gradients are summed."""

    @property
    def total(self) -> int:
        """The larger of both moments, without what the allocator and libraries hold besides."""
        states = self.weights + self.gradients + self.optimizer
        return states + max(self.activations + self.head + self.buffers, self.summing)


def plan_memory(
    config: TrainConfig,
    *,
    world_size: int,
    count_layer: LayerCounter | None = None,
    on_cpu: bool = False,
) -> MemoryPlan:
    """Memory of the fullest rank: states exactly, activations counted on fake tensors.

    Args:
        config: The run.
        world_size: Number of ranks.
        count_layer: One that many plans share, so that a layer is counted once.
        on_cpu: The ranks compute on processors, where DeepSpeed sums through other buffers.
    """
    zero = ZeroMemory(config, _counts(config, world_size=world_size), on_cpu=on_cpu)
    return MemoryPlan(
        weights=zero.weights,
        gradients=zero.gradients,
        optimizer=zero.optimizer,
        activations=_activations(config, count_layer or LayerCounter(), world_size=world_size),
        head=_head(config),
        buffers=zero.buffers,
        summing=zero.summing,
    )


def memory_by_stage(config: TrainConfig, *, world_size: int) -> dict[int, MemoryPlan]:
    """The same for every ZeRO stage that goes with the layout."""
    possible: tuple[int, ...] = (0, 1) if config.parallel.pp_size > 1 else (0, 1, 2, 3)
    if config.parallel.ep_size > 1:  # experts that ranks share out are not cut further
        possible = possible[:3]
    count_layer = LayerCounter()
    return {
        stage: plan_memory(
            replace(config, parallel=replace(config.parallel, zero_stage=stage)),
            world_size=world_size,
            count_layer=count_layer,
        )
        for stage in possible
    }


def _counts(config: TrainConfig, *, world_size: int) -> Counts:
    parallel = config.parallel
    sharers = parallel.dp_size(world_size) * parallel.ulysses_size
    whole = -(-_parameters_of_stages(config) // parallel.tp_size)
    experts = -(-_experts_of_stages(config) // parallel.tp_size)
    # Ranks that share out the experts hold a part of them each, which fewer others hold too.
    held = whole - experts + -(-experts // parallel.ep_size)
    share = -(-whole // sharers)
    trained, trained_share = held, share
    if config.lora.rank:  # the weights rest; gradients and optimizer are the adapters'
        numbers = sum(math.prod(shape) for shape in global_shapes(config).values())
        trained = -(-numbers // parallel.tp_size)
        trained_share = -(-trained // sharers)
    return Counts(
        held=held, share=share, trained=trained, trained_share=trained_share, sharers=sharers
    )


def _experts_of_stages(config: TrainConfig) -> int:
    """Those of them that are experts', where ranks share these out; else none are counted."""
    model, parallel = config.model, config.parallel
    if parallel.ep_size == 1:
        return 0
    matrices = 3 if model.gated else 2
    biases = (matrices - 1) * model.expert_width + model.hidden_size if model.add_bias else 0
    one = matrices * model.hidden_size * model.expert_width + biases
    held = [0] * parallel.pp_size
    for stage, owner in zip(stages(config), _owners(config), strict=True):
        held[owner] += sum(model.experts[layer] for layer in stage.layers)
    return one * max(held)


def _owners(config: TrainConfig) -> Sequence[int]:
    """The pipeline rank of every stage."""
    parallel = config.parallel
    if parallel.pp_size == 1:
        return (0,)
    schedule = schedule_named(parallel.pipeline_schedule)
    chunks = parallel.stage_count // parallel.pp_size
    return schedule.owners(pp_size=parallel.pp_size, chunks=chunks)


def _parameters_of_stages(config: TrainConfig) -> int:
    """Parameters of the stages of the fullest pipeline rank, before tensor parallelism."""
    parallel = config.parallel
    if parallel.pp_size == 1:
        return config.model.num_params()
    costs, held = parameter_costs(config.model.core()), [0.0] * parallel.pp_size
    for stage, owner in zip(stages(config), _owners(config), strict=True):
        held[owner] += sum(costs[layer] for layer in stage.layers)
    return round(max(held))


def _activations(config: TrainConfig, count_layer: LayerCounter, *, world_size: int) -> int:
    memory = config.memory
    whole = replace(config, memory=replace(memory, recompute="none", recompute_layers=1))
    layer = count_layer(config)
    layers = _layers_of_fullest_rank(config)
    if memory.recompute != "full":
        return round(layers * layer * _under_way(config, world_size=world_size))
    blocks = -(-layers // memory.recompute_layers)
    kept = blocks * layer * _under_way(config, world_size=world_size)
    return round(kept + min(memory.recompute_layers, layers) * count_layer(whole))


def _layers_of_fullest_rank(config: TrainConfig) -> int:
    parallel = config.parallel
    if parallel.pp_size == 1:
        return config.model.num_layers
    per_rank = parallel.stage_count // parallel.pp_size
    layers = per_rank * max(len(stage.layers) for stage in stages(config))
    # Of a T5 a layer is counted with its share of the decoder.
    return -(-layers * config.model.num_layers // config.model.core().stacked_layers)


def _under_way(config: TrainConfig, *, world_size: int) -> float:
    """Micro batches whose activations the fullest rank holds at once, from the simulator."""
    parallel, train = config.parallel, config.train
    if parallel.pp_size == 1:
        return 1.0
    count = train.global_batch_size // (train.micro_batch_size * parallel.dp_size(world_size))
    if parallel.pipeline_schedule == "gpipe":
        return float(count)
    if parallel.pipeline_schedule == "1f1b":
        return float(min(count, parallel.pp_size))
    simulation = simulate(
        parallel.pipeline_schedule,
        pp_size=parallel.pp_size,
        micro_batches=min(count, 4 * parallel.pp_size),
        chunks=parallel.stage_count // parallel.pp_size,
    )
    return max(simulation.peak_activations)


def _head(config: TrainConfig) -> int:
    """The chunked loss keeps the gradients of its input and of its weight, and one chunk.

    A BERT and a T5 have all scores at once, and their gradient.
    """
    model, parallel = config.model, config.parallel
    length = config.data.decoder_seq_length or config.data.seq_length
    positions = config.train.micro_batch_size * length // parallel.ulysses_size
    rows = model.padded_vocab_size(parallel.tp_size) // parallel.tp_size
    if model.family != "gpt":
        return 2 * positions * rows * (_FP32 if config.train.precision == "fp32" else _HALF)
    chunk = min(positions, 1024) * rows * _FP32
    return positions * model.hidden_size * _FP32 + rows * model.hidden_size * _FP32 + 2 * chunk
