"""What a family of models asks of the other tables. Each check names the settings that clash."""

from __future__ import annotations

from mds_train.config.data import DataConfig
from mds_train.config.memory import MemoryConfig
from mds_train.config.model import ModelConfig
from mds_train.config.parallel import ParallelConfig

__all__ = ["check_family_data", "check_family_layout", "check_family_memory"]

_OF_GPT = (
    *("conversations", "reset_attention_mask", "reset_position_ids", "eod_mask_loss"),
    "learn_prompts",
)
_LACKS: dict[str, tuple[str, ...]] = {
    "gpt": (
        *("decoder_seq_length", "pairs", "segments", "mask_probability", "short_probability"),
        "tokenizer",
    ),
    "bert": (*_OF_GPT, "decoder_seq_length", "pairs"),
    "t5": (*_OF_GPT, "segments"),
}


def check_family_data(model: ModelConfig, data: DataConfig) -> None:
    """The samples are of the kind that the model reads.

    Raises:
        ValueError: If a setting belongs to another family, or one is missing.
    """
    family = model.family
    for name in _LACKS[family]:
        if getattr(data, name) not in (None, False):
            raise ValueError(
                f"data.{name} means nothing to samples of a {family} (model.family); leave it out."
            )
    if family != "gpt" and data.curriculum_start_length is not None:
        raise ValueError(
            f"data.curriculum_start_length cuts samples at their end, which those of a {family} "
            f"(model.family) cannot be; leave it out."
        )
    if family == "bert" and data.segments is not None and model.binary_head is False:
        raise ValueError(
            f"data.segments {data.segments!r} makes the two segments that the binary head judges, "
            f"but model.binary_head is false; leave one of the two out."
        )
    if family == "t5":
        _check_decoder(model, data)


def _check_decoder(model: ModelConfig, data: DataConfig) -> None:
    length, positions = data.decoder_seq_length, model.max_position_embeddings
    if length is None:
        raise ValueError(
            "data.decoder_seq_length is not set; a T5 (model.family) needs the tokens that its "
            "decoder writes, beside data.seq_length, which its encoder reads."
        )
    if length > positions:
        raise ValueError(
            f"data.decoder_seq_length {length} is longer than model.max_position_embeddings "
            f"{positions}; shorten the samples or give the model more positions."
        )
    if not data.pairs:
        return
    for name in ("mask_probability", "short_probability"):
        if getattr(data, name) is not None:
            raise ValueError(
                f"data.{name} is for spans cut out of a text, but data.pairs is set, whose samples "
                f"are source and target; leave one of the two out."
            )
    if data.order != "fast":
        raise ValueError(
            f'data.order "{data.order}" is not known for pairs (data.pairs), which the original '
            f'does not train on; use "fast".'
        )


def check_family_memory(model: ModelConfig, memory: MemoryConfig) -> None:
    """The family can compute so.

    Raises:
        ValueError: If it cannot.
    """
    if memory.sequence_chunk is not None and model.family != "gpt":
        raise ValueError(
            f"memory.sequence_chunk is {memory.sequence_chunk}, but only a gpt cuts its sequences, "
            f"and model.family is {model.family!r}; leave it out."
        )


def check_family_layout(model: ModelConfig, data: DataConfig, parallel: ParallelConfig) -> None:
    """The family can be spread over the ranks so.

    Raises:
        ValueError: If it cannot.
    """
    family = model.family
    if parallel.split_rank is not None and family != "t5":
        raise ValueError(
            f"parallel.split_rank is {parallel.split_rank}, but only a t5 has an encoder and a "
            f"decoder to split, and model.family is {family!r}; leave it out."
        )
    if family == "gpt":
        return
    if parallel.ulysses_size > 1:
        raise ValueError(
            f"parallel.ulysses_size is {parallel.ulysses_size}, but a {family} (model.family) is "
            f"spread over parallel.tp_size, pp_size and data-parallel ranks only; use ulysses_size "
            f"1, and a larger tp_size or pp_size to save memory."
        )
    if not parallel.sequence_parallel:
        return
    length = data.decoder_seq_length or parallel.tp_size
    if length % parallel.tp_size:
        raise ValueError(
            f"data.decoder_seq_length {length} is not a multiple of parallel.tp_size "
            f"{parallel.tp_size}, whose ranks hold equal parts of it (parallel.sequence_parallel). "
            f"Change one of them."
        )
