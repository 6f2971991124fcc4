"""How large a run is before it starts: parameters, operations, and memory of one rank by part."""

from __future__ import annotations

from dataclasses import dataclass

from mds_train.config import TrainConfig

__all__ = ["MemoryEstimate", "estimate_memory"]

_FP32, _BF16 = 4, 2

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
    parameters = -(-config.model.num_params() // parallel.tp_size)
    shared = -(-parameters // (dp_size * parallel.ulysses_size))
    low = config.train.precision == "bf16"
    weight_bytes = _BF16 if low else _FP32
    # ZeRO keeps its own flat fp32 copy of what it updates, also when the weights are fp32.
    masters = _FP32 if low or stage else 0
    return MemoryEstimate(
        weights=weight_bytes * (shared if stage == 3 else parameters),
        gradients=_FP32 * (shared if stage >= 2 else parameters),
        optimizer=(masters + 2 * _FP32) * (shared if stage else parameters),
        activations=_activations(config, value_bytes=weight_bytes),
    )


def _activations(config: TrainConfig, *, value_bytes: int) -> int:
    model, parallel, memory = config.model, config.parallel, config.memory
    positions = config.train.micro_batch_size * config.data.seq_length // parallel.ulysses_size
    whole = -(-_KEPT_WHOLE // (parallel.tp_size if parallel.sequence_parallel else 1))
    layer = whole + -(-_KEPT_SPLIT // parallel.tp_size)
    kept = model.num_layers * layer
    if memory.recompute == "full":  # the inputs of the blocks, and one block at a time
        blocks = -(-model.num_layers // memory.recompute_layers)
        kept = blocks + min(memory.recompute_layers, model.num_layers) * layer
    logits = positions * model.padded_vocab_size(1) * _FP32 // parallel.tp_size
    return kept * positions * model.hidden_size * value_bytes + logits
