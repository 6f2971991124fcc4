"""What a family of models reads of one store: its dataset, and how samples become a micro batch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from mds_data import (
    BertDataset,
    GPTDataset,
    MaskingStyle,
    NMTDataset,
    SFTDataset,
    T5Dataset,
    TokenStore,
    Vocabulary,
)
from mds_data.tokenizers.load import load_tokenizer, spec_of_file
from mds_data.tokenizers.protocol import TokenizerKind, TokenizerSpec
from mds_train.batches import Collate, Samples, collate
from mds_train.config import TrainConfig
from mds_train.data.documents import collate_documents
from mds_train.data.masked_words import collate_segments, collate_words
from mds_train.data.source_and_target import collate_source_and_target
from mds_train.data.taught import taught

__all__ = ["Split", "collate_of", "dataset_of", "kind_of_samples"]

Split: TypeAlias = str | tuple[str, str] | None

# Megatron adds marks to what these files hold.
_MEGATRON_KINDS: Mapping[str, TokenizerKind] = MappingProxyType(
    {".txt": "bert-wordpiece", ".model": "sentencepiece-megatron"}
)
_MASK_PROBABILITY, _SHORT_PROBABILITY = 0.15, 0.1


def collate_of(config: TrainConfig) -> Collate:
    """How samples of the run become a micro batch."""
    if config.model.family == "bert":
        return collate_words if config.model.binary_head is False else collate_segments
    if config.model.family == "gpt":
        read: Collate = collate_documents if config.data.marks_documents else collate
        return read if config.distill.teacher is None else taught(read)
    return collate_source_and_target


def dataset_of(
    config: TrainConfig, store: TokenStore, *, split: Split, num_samples: int | None
) -> Samples:
    """The samples of one store.

    Raises:
        ValueError: If the store does not hold what the family reads.
    """
    if config.model.family == "gpt":
        read = _conversations if config.data.conversations else _texts
        return read(config, store, split=split, num_samples=num_samples)
    if config.model.family == "bert":
        return _masked_words(config, store, split=split, num_samples=num_samples)
    if config.data.pairs:
        return _pairs(config, store, split=split, num_samples=num_samples)
    return _spans(config, store, split=split, num_samples=num_samples)


def kind_of_samples(config: TrainConfig) -> Mapping[str, object]:
    """What makes samples besides length, seed and split: a checkpoint keeps it, a resume compares.

    Empty for a GPT that reads texts as they are.
    """
    data, family = config.data, config.model.family
    if family == "gpt":
        marks = ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")
        names = ("conversations", "packing", "learn_prompts") if data.conversations else marks
        return {name: getattr(data, name) for name in names if getattr(data, name)}
    if data.pairs:
        return {"decoder_seq_length": data.decoder_seq_length, "pairs": True}
    shared = {
        "mask_probability": _mask_probability(config),
        "short_probability": _short_probability(config),
    }
    if family == "bert":
        return {"segments": _segments(config), **shared}
    return {"decoder_seq_length": data.decoder_seq_length, **shared}


def _texts(
    config: TrainConfig, store: TokenStore, *, split: Split, num_samples: int | None
) -> GPTDataset:
    data = config.data
    return GPTDataset(
        store,
        seq_length=data.seq_length,
        num_samples=num_samples,
        seed=config.train.seed,
        split=split,
        order=data.order,
        reset_attention_mask=data.reset_attention_mask,
        reset_position_ids=data.reset_position_ids,
        eod_mask_loss=data.eod_mask_loss,
    )


def _conversations(
    config: TrainConfig, store: TokenStore, *, split: Split, num_samples: int | None
) -> SFTDataset:
    return SFTDataset(
        store,
        seq_length=config.data.seq_length,
        num_samples=num_samples,
        seed=config.train.seed,
        split=split,
        packing=config.data.packing,
        learn_all=config.data.learn_prompts,
        pad_id=store.eod_id or 0,
    )


def _masked_words(
    config: TrainConfig, store: TokenStore, *, split: Split, num_samples: int | None
) -> BertDataset:
    return BertDataset(
        store,
        seq_length=config.data.seq_length,
        num_samples=num_samples,
        seed=config.train.seed,
        split=split,
        order=config.data.order,
        segments=_segments(config),  # type: ignore[arg-type]
        masking=MaskingStyle(probability=_mask_probability(config)),
        short_probability=_short_probability(config),
        vocabulary=_vocabulary(config),
    )


def _spans(
    config: TrainConfig, store: TokenStore, *, split: Split, num_samples: int | None
) -> T5Dataset:
    return T5Dataset(
        store,
        seq_length=config.data.seq_length,
        decoder_seq_length=_decoder_length(config),
        num_samples=num_samples,
        seed=config.train.seed,
        split=split,
        order=config.data.order,
        masking=MaskingStyle(probability=_mask_probability(config), longest=10, geometric=True),
        short_probability=_short_probability(config),
        vocabulary=_vocabulary(config),
    )


def _pairs(
    config: TrainConfig, store: TokenStore, *, split: Split, num_samples: int | None
) -> NMTDataset:
    return NMTDataset(
        store,
        seq_length=config.data.seq_length,
        decoder_seq_length=_decoder_length(config),
        num_samples=num_samples,
        seed=config.train.seed,
        split=split,
        vocabulary=_vocabulary(config),
    )


def _segments(config: TrainConfig) -> str:
    return "one" if config.model.binary_head is False else config.data.segments or "order"


def _mask_probability(config: TrainConfig) -> float:
    given = config.data.mask_probability
    return _MASK_PROBABILITY if given is None else given


def _short_probability(config: TrainConfig) -> float:
    given = config.data.short_probability
    return _SHORT_PROBABILITY if given is None else given


def _decoder_length(config: TrainConfig) -> int:
    length = config.data.decoder_seq_length
    assert length is not None  # the configuration has checked it
    return length


def _vocabulary(config: TrainConfig) -> Vocabulary | None:
    """The tokenizer of data.tokenizer; None takes the store's own."""
    if config.data.tokenizer is None:
        return None
    path = Path(config.data.tokenizer)
    kind = _MEGATRON_KINDS.get(path.suffix)
    spec = spec_of_file(path) if kind is None else TokenizerSpec(kind=kind, path=path)
    vocabulary = Vocabulary.of_tokenizer(load_tokenizer(spec))
    # Ids beyond the file's are T5's sentinels, as in a store.
    extra = config.model.vocab_size - len(vocabulary) if config.model.family == "t5" else 0
    sentinels = [f"<extra_id_{number}>" for number in range(extra)]
    return Vocabulary([*vocabulary.pieces, *sentinels], name=vocabulary.name)
