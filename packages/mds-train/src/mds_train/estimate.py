"""How large a run is before it starts: parameters, operations, and memory of one rank by part."""

from __future__ import annotations

from dataclasses import dataclass

from mds_core.partition import parameter_costs
from mds_core.pipeline.schedule import schedule_named
from mds_train.config import TrainConfig
from mds_train.model_building import stages

__all__ = ["MemoryEstimate", "estimate_memory"]

_FP32, _HALF = 4, 2

# Values of size [s, b, h] that one layer keeps for the backward pass with fused attention, after
# Korthikanti et al. 2022 (34 bytes in half precision); tensor parallelism splits the second part.
_KEPT_WHOLE, _KEPT_SPLIT = 5, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes of one rank."""

    weights: int
    gradients: int
    optimizer: int
    """fp32 masters where the engine keeps them, and both moments."""
    activations: int
    """Of one micro batch; a rough figure."""

    @property
    def total(self) -> int:
        """All parts together."""
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate_memory(config: TrainConfig, *, world_size: int) -> MemoryEstimate:
    """Estimate the memory of one rank.

    Args:
        config: the run.
        world_size: number of ranks.
    """
    parallel = config.parallel
    dp_size, stage = parallel.dp_size(world_size), parallel.zero_stage
    parameters = -(-_parameters_of_stages(config) // parallel.tp_size)
    shared = -(-parameters // (dp_size * parallel.ulysses_size))
    low = config.train.precision != "fp32"
    weight_bytes = _HALF if low else _FP32
    # ZeRO keeps its own flat fp32 copy of what it updates, also when the weights are fp32.
    masters = _FP32 if low or stage else 0
    return MemoryEstimate(
        weights=weight_bytes * (shared if stage == 3 else parameters),
        gradients=_FP32 * (shared if stage >= 2 else parameters),
        optimizer=(masters + 2 * _FP32) * (shared if stage else parameters),
        activations=_activations(config, dp_size=dp_size, value_bytes=weight_bytes),
    )


def _parameters_of_stages(config: TrainConfig) -> int:
    """Parameters of the stages of the fullest pipeline rank, before tensor parallelism."""
    parallel = config.parallel
    if parallel.pp_size == 1:
        return config.model.num_params()
    costs, held = parameter_costs(config.model.core()), [0.0] * parallel.pp_size
    schedule = schedule_named(parallel.pipeline_schedule)
    owners = schedule.owners(
        pp_size=parallel.pp_size, chunks=parallel.stage_count // parallel.pp_size
    )
    for stage, owner in zip(stages(config), owners, strict=True):
        held[owner] += sum(costs[layer] for layer in stage.layers)
    return round(max(held))


def _activations(config: TrainConfig, *, dp_size: int, value_bytes: int) -> int:
    model, parallel, memory = config.model, config.parallel, config.memory
    positions = config.train.micro_batch_size * config.data.seq_length // parallel.ulysses_size
    whole = -(-_KEPT_WHOLE // (parallel.tp_size if parallel.sequence_parallel else 1))
    layer = whole + -(-_KEPT_SPLIT // parallel.tp_size)
    layers = -(-model.num_layers // parallel.pp_size)
    kept = layers * layer
    working = 0
    if memory.recompute == "full":  # the inputs of the blocks, and one block at a time
        kept = -(-layers // memory.recompute_layers)
        working = min(memory.recompute_layers, layers) * layer
    kept = kept * _micro_batches_under_way(config, dp_size=dp_size) + working
    logits = positions * model.padded_vocab_size(1) * _FP32 // parallel.tp_size
    return kept * positions * model.hidden_size * value_bytes + logits


def _micro_batches_under_way(config: TrainConfig, *, dp_size: int) -> int:
    """Micro batches that a rank keeps activations of at once; all with gpipe."""
    parallel, train = config.parallel, config.train
    if parallel.pp_size == 1:
        return 1
    count = train.global_batch_size // (train.micro_batch_size * dp_size)
    return count if parallel.pipeline_schedule == "gpipe" else min(count, parallel.pp_size)
