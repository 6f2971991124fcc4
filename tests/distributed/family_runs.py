"""Tiny runs of a BERT, a T5 and a translator, and the stores of sentences that they read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tiny_run import tiny_config

from mds_data import StoreWriter, TokenizerFile
from mds_data.tokenizers.bert import load_bert_tokenizer
from mds_train.config import DataConfig, ModelConfig, TrainConfig

WORDS = 60
VOCABULARY = 97
"""5 marks, the words, [BOS], [EOS] and 30 sentinels; 104 rows on one rank, 112 on two."""

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
MODELS = {
    "bert": ModelConfig(family="bert", **_SHAPE),
    "t5": ModelConfig(family="t5", **_SHAPE),
    "translation": ModelConfig(family="t5", decoder_num_layers=1, **_SHAPE),
}


def make_stores(folder: Path) -> None:
    """Write ``sentences`` and ``pairs``."""
    path = folder / "vocab.txt"
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    path.write_text("\n".join([*marks, *(f"w{number}" for number in range(WORDS))]) + "\n")
    tokenizer = load_bert_tokenizer(path, lower_case=True, extra_ids=30)
    file = TokenizerFile(kind=tokenizer.kind, content=tokenizer.file.content)
    random = np.random.default_rng(3)
    for name, counts in (("sentences", (2, 7)), ("pairs", (2, 3))):
        with StoreWriter(
            folder / name, vocab_size=VOCABULARY, sentences=True, tokenizer=file, split="80,20,0"
        ) as writer:
            for _ in range(80):
                lengths = random.integers(2, 9, random.integers(*counts)).tolist()
                ids = random.integers(len(marks), len(marks) + WORDS, sum(lengths))
                writer.add(ids, sentence_lengths=lengths)
            writer.commit()


def family_config(folder: Path, kind: str, run: str, **changes: dict[str, Any]) -> TrainConfig:
    """Six steps of eight samples, a validation at 3 and 6; ``changes`` replace fields."""
    pairs = kind == "translation"
    data = DataConfig(
        store=str(folder / ("pairs" if pairs else "sentences")),
        seq_length=24,
        decoder_seq_length=None if kind == "bert" else 16,
        pairs=pairs,
    )
    plain = tiny_config(folder / "sentences", folder / run, watch={"eval_interval": 3})
    config = replace(plain, model=MODELS[kind], data=data)
    tables = {name: replace(getattr(config, name), **values) for name, values in changes.items()}
    return replace(config, **tables)
