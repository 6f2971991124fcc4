"""A run goes on from Megatron-DeepSpeed's own checkpoint: its next losses are the original's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from golden_runs import golden_folder, golden_losses
from recorded_runs import losses_on

from mds_ckpt import open_checkpoint
from mds_train.config import (
    CheckpointConfig,
    DataConfig,
    LoopConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
    TrainConfig,
)

pytestmark = pytest.mark.timeout(420)

# The original padded 600 tokens to 768 rows on two tensor-parallel ranks.
GPT = ModelConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=600,
    max_position_embeddings=64,
    make_vocab_size_divisible_by=256,
    legacy_vocab_softmax=True,
)


def config_in(run_dir: Path, *, tp_size: int, zero_stage: int) -> TrainConfig:
    """The argv of the original's resumed run in our words."""
    golden = golden_folder()
    return TrainConfig(
        model=replace(GPT, make_vocab_size_divisible_by=256 // tp_size),
        data=DataConfig(
            store=str(golden / "datasets" / "pydoc_text_document"),
            seq_length=64,
            split="90,5,5",
            order="megatron",
        ),
        train=LoopConfig(
            run_dir=str(run_dir),
            train_steps=20,
            global_batch_size=8,
            micro_batch_size=2,
            precision="bf16",
        ),
        optimizer=OptimizerConfig(lr=3e-3, beta2=0.95, weight_decay=0.1),
        schedule=ScheduleConfig(kind="cosine", min_lr=3e-4, warmup_steps=2),
        parallel=ParallelConfig(tp_size=tp_size, zero_stage=zero_stage),
        checkpoint=CheckpointConfig(load=str(golden / "gpt_tp2pp2dp2_z1_bf16" / "ckpt")),
    )


@pytest.mark.parametrize(
    ("ranks", "tp_size", "zero_stage"), [(1, 1, 1), (2, 2, 1), (4, 2, 2), (2, 1, 3)]
)
def test_the_next_losses_are_the_originals(
    tmp_path: Path, ranks: int, tp_size: int, zero_stage: int
) -> None:
    config = config_in(tmp_path / "run", tp_size=tp_size, zero_stage=zero_stage)

    losses = losses_on({"run": config}, ranks=ranks)["run"]

    golden = golden_losses("resume_gpt_tp2pp2dp2_z1_bf16")
    assert len(losses) == 10
    # The original's own layouts differ by 1.4e-4 in bf16; it sums gradients in bf16 besides.
    assert losses == pytest.approx(golden, abs=5e-4)
    assert losses[0] == pytest.approx(golden[0], abs=2e-4)


def test_padded_rows_are_kept_and_without_them_the_losses_are_others(tmp_path: Path) -> None:
    legacy = config_in(tmp_path / "legacy", tp_size=1, zero_stage=1)
    masked = replace(
        legacy,
        model=replace(GPT, legacy_vocab_softmax=False),
        train=replace(legacy.train, run_dir=str(tmp_path / "masked"), exit_step=11),
    )

    losses = losses_on({"legacy": legacy, "masked": masked}, ranks=1)

    assert losses["masked"][0] < losses["legacy"][0] - 0.02
    saved = open_checkpoint(tmp_path / "legacy" / "checkpoints")
    assert (saved.model.vocab_size, saved.model.padded_vocab_size) == (600, 768)
    assert saved.tensor("embedding.word_embeddings.weight", "exp_avg").shape == (768, 32)
