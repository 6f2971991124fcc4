"""A tiny run: random text, two layers, dropout, a vocabulary that is padded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mds_data import write_store
from mds_train.config import (
    CheckpointConfig,
    DataConfig,
    Fp16Config,
    LoopConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
    TrainConfig,
    WatchConfig,
)

VOCABULARY = 100
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCABULARY,
    max_position_embeddings=16,
    # 104 rows on one tensor-parallel rank, 112 on two.
    make_vocab_size_divisible_by=8,
    activation="swiglu",
    ffn_hidden_size=48,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)


def make_store(folder: Path) -> Path:
    """A store of random documents in ``folder``."""
    random = np.random.default_rng(7)
    documents = [random.integers(0, VOCABULARY, random.integers(8, 60)) for _ in range(60)]
    write_store(folder / "store", documents, vocab_size=VOCABULARY, eod_id=0)
    return folder / "store"


def tiny_config(store: Path, run_dir: Path, **changes: dict[str, Any]) -> TrainConfig:
    """Six steps of eight samples; ``changes`` replace fields of the tables."""
    config = TrainConfig(
        model=MODEL,
        data=DataConfig(store=str(store), seq_length=16, split="100,0,0"),
        train=LoopConfig(
            run_dir=str(run_dir), train_steps=6, global_batch_size=8, micro_batch_size=2, seed=7
        ),
        optimizer=OptimizerConfig(lr=2e-3),
        schedule=ScheduleConfig(warmup_steps=2, min_lr=1e-4),
        parallel=ParallelConfig(),
        memory=MemoryConfig(),
        fp16=Fp16Config(),
        checkpoint=CheckpointConfig(keep_last=0),
        watch=WatchConfig(),
    )
    tables = {name: replace(getattr(config, name), **values) for name, values in changes.items()}
    return replace(config, **tables)
