"""What a layout asks of the model and the data. Each check names the settings that clash."""

from __future__ import annotations

from mds_train.config.data import DataConfig
from mds_train.config.model import ModelConfig
from mds_train.config.parallel import ParallelConfig

__all__ = ["check_sequence_shares", "check_whole_heads"]


def check_whole_heads(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Tensor-parallel ranks share out heads whole, and ulysses ranks what each of them has.

    Raises:
        ValueError: If they do not divide.
    """
    tp_size, heads = parallel.tp_size, model.num_attention_heads
    groups = model.num_key_value_heads or heads
    if heads % tp_size or groups % tp_size:
        raise ValueError(
            f"parallel.tp_size {tp_size} does not divide model.num_attention_heads {heads} and "
            f"num_key_value_heads {groups}; each rank needs whole heads."
        )
    if (groups // tp_size) % parallel.ulysses_size:
        raise ValueError(
            f"parallel.ulysses_size {parallel.ulysses_size} does not divide the "
            f"{groups // tp_size} key/value heads of a tensor-parallel rank "
            f"(model.num_key_value_heads {groups}, parallel.tp_size {tp_size}); each rank attends "
            f"with whole heads."
        )


def check_sequence_shares(data: DataConfig, parallel: ParallelConfig) -> None:
    """Ranks that share a sequence hold equally many of its positions.

    Raises:
        ValueError: If data.seq_length does not divide.
    """
    shares, names = parallel.ulysses_size, f"parallel.ulysses_size {parallel.ulysses_size}"
    if parallel.sequence_parallel:
        shares *= parallel.tp_size
        names += f" * tp_size {parallel.tp_size} (parallel.sequence_parallel)"
    if data.seq_length % shares:
        raise ValueError(
            f"data.seq_length {data.seq_length} is not a multiple of {names}: the ranks that share "
            f"a sequence hold equal parts of it. Change one of them."
        )
