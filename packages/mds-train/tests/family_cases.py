"""Tiny runs of BERTs and of encoders with decoders, and the stores that they read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from engine_cases import tiny_config

from mds_data import StoreWriter, TokenizerFile
from mds_data.tokenizers.bert import load_bert_tokenizer
from mds_train import TrainConfig
from mds_train.config import ModelConfig

_WORDS = [f"w{number}" for number in range(40)] + [f"##p{number}" for number in range(20)]
VOCABULARY = 97
"""5 marks, 60 words, [BOS], [EOS] and 30 sentinels."""

_SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "make_vocab_size_divisible_by": 8,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}
BERT = ModelConfig(family="bert", **_SHAPE)
ONE_HEAD = ModelConfig(family="bert", binary_head=False, **_SHAPE)
T5 = ModelConfig(family="t5", decoder_num_layers=1, **_SHAPE)


def tokenizer_file(folder: Path) -> TokenizerFile:
    path = folder / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS]) + "\n")
    tokenizer = load_bert_tokenizer(path, lower_case=True, extra_ids=30)
    assert tokenizer.vocab_size == VOCABULARY
    return TokenizerFile(kind=tokenizer.kind, content=tokenizer.file.content)


def make_sentences(folder: Path, *, documents: int = 80) -> Path:
    """A store of documents of a few sentences, 80 % to train on; next to it vocab.txt."""
    random = np.random.default_rng(3)
    lengths = [random.integers(2, 9, random.integers(2, 7)).tolist() for _ in range(documents)]
    return _write(folder, "sentences", lengths, random=random)


def make_pairs(folder: Path) -> Path:
    """A store of pairs of source and target."""
    random = np.random.default_rng(4)
    lengths = [random.integers(2, 12, 2).tolist() for _ in range(60)]
    return _write(folder, "pairs", lengths, random=random)


def _write(
    folder: Path, name: str, lengths: list[list[int]], *, random: np.random.Generator
) -> Path:
    path = folder / name
    with StoreWriter(
        path,
        vocab_size=VOCABULARY,
        sentences=True,
        tokenizer=tokenizer_file(folder),
        split="80,20,0",
    ) as writer:
        for sizes in lengths:
            writer.add(random.integers(5, 65, sum(sizes)), sentence_lengths=sizes)
        writer.commit()
    return path


def family_config(
    folder: Path, model: ModelConfig, *, pairs: bool = False, **changes: dict[str, Any]
) -> TrainConfig:
    """A run of six steps on the stores in ``folder``; ``changes`` replace fields of the tables."""
    data: dict[str, Any] = {"store": str(folder / "sentences"), "seq_length": 24}
    if model.family == "t5":
        data |= {"decoder_seq_length": 16}
    if pairs:
        data |= {"store": str(folder / "pairs"), "pairs": True}
    plain = tiny_config(folder)  # whose data are those of a GPT
    config = replace(plain, model=model, data=replace(plain.data, **data))
    tables = {name: replace(getattr(config, name), **values) for name, values in changes.items()}
    return replace(config, **tables)
