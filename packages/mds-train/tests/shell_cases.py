"""Small configurations and reports that several tests of commands and watchers share."""

from __future__ import annotations

from pathlib import Path

from mds_train.config import DataConfig, LoopConfig, ModelConfig, TrainConfig
from mds_train.events import FinishReport, StartReport, StepReport, ValidationReport


def tiny_config(run_dir: Path, *, store: str = "store") -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=2,
            vocab_size=128,
            max_position_embeddings=16,
        ),
        data=DataConfig(store=store, seq_length=16),
        train=LoopConfig(run_dir=str(run_dir), train_steps=10, global_batch_size=2),
    )


def start(run_dir: Path, *, step: int = 0) -> StartReport:
    config = tiny_config(run_dir)
    return StartReport(
        config=config,
        run_dir=run_dir,
        rank=0,
        world_size=2,
        parallel={"tp": 2, "pp": 1, "dp": 1, "ulysses": 1, "ep": 1, "zero_stage": 1},
        num_parameters=12_345,
        flops_per_token=1e6,
        step=step,
        consumed_samples=2 * step,
        consumed_tokens=32 * step,
        resumed_from=run_dir / f"checkpoints/step-{step}" if step else None,
    )


def step(number: int, *, loss: float = 4.0, seconds: float = 0.5) -> StepReport:
    return StepReport(
        step=number,
        loss=loss,
        lr=1e-3,
        weight_decay=0.1,
        grad_norm=0.8,
        seconds=seconds,
        data_seconds=0.0,
        tokens_per_second=32 / seconds,
        batch_samples=2,
        seq_length=16,
        consumed_samples=2 * number,
        consumed_tokens=32 * number,
        applied_updates=number,
        skipped_steps=0,
        skipped=False,
    )


def validation(number: int, *, loss: float = 4.1) -> ValidationReport:
    return ValidationReport(step=number, loss=loss, tokens=1000, seconds=0.2)


def finish(number: int) -> FinishReport:
    return FinishReport(
        step=number,
        reason="done",
        loss=3.0,
        validation_loss=3.1,
        checkpoint=Path("checkpoints/step-10"),
        seconds=61.0,
    )
