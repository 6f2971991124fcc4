"""Flags of the original for data, checkpoints and what is watched."""

from __future__ import annotations

from mds_train.config.megatron_conversions import blend, numbers_of, timing, wandb
from mds_train.config.megatron_kinds import (
    Derived,
    Ignored,
    Many,
    OldFlag,
    Only,
    Refused,
    Switch,
    Value,
)

__all__ = ["RUN_FLAGS"]

_DATA: tuple[OldFlag, ...] = (
    Many(names=("--data-path", "--train-data-path"), read=blend("")),
    Many(names=("--valid-data-path",), read=blend("valid_")),
    Value(names=("--split",), key="data.split"),
    Value(names=("--seq-length", "--encoder-seq-length"), key="data.seq_length"),
    Value(names=("--decoder-seq-length",), key="data.decoder_seq_length"),
    Value(names=("--mask-prob",), key="data.mask_probability"),
    Value(names=("--short-seq-prob",), key="data.short_probability"),
    Value(names=("--num-workers",), key="data.workers"),
    Ignored(
        names=(
            "--tokenizer-type",
            "--tokenizer-model",
            "--vocab-file",
            "--merge-file",
            "--vocab-extra-ids",
        ),
        takes_value=True,
        reason=(
            "the tokens are read as they were preprocessed, and a store knows its tokenizer (a "
            "Megatron pair of a BERT or T5 does not: --data.tokenizer FILE)"
        ),
    ),
    Ignored(names=("--data-impl",), takes_value=True, reason="the store is always memory mapped"),
    Ignored(
        names=("--data-cache-path",), takes_value=True, reason="the order is computed, not cached"
    ),
    Only(
        names=("--dataloader-type",),
        allowed=("single",),
        instead="leave it out: every epoch has its own computed order, on any number of ranks",
    ),
    Switch(names=("--reset-position-ids",), values={"data.reset_position_ids": True}),
    Switch(names=("--reset-attention-mask",), values={"data.reset_attention_mask": True}),
    Switch(names=("--eod-mask-loss",), values={"data.eod_mask_loss": True}),
    Refused(
        names=("--test-data-path",),
        instead=(
            "leave it out: a run measures the validation loss only; for a test, run again with "
            "--train.skip-train and the test data as --data.valid-stores"
        ),
    ),
    Refused(names=("--mmap-warmup",), instead="leave it out: reading ahead is the system's work"),
)

_CHECKPOINT: tuple[OldFlag, ...] = (
    Value(
        names=("--save",),
        key="train.run_dir",
        note="the folder becomes the run's: checkpoints are in its checkpoints/",
    ),
    Value(names=("--load",), key="checkpoint.load"),
    Value(names=("--save-interval",), key="checkpoint.save_interval"),
    Switch(names=("--async-save",), values={"checkpoint.async_save": True}),
    Value(names=("--backup",), key="checkpoint.backup"),
    Switch(
        names=("--from-scratch-if-missing",),
        values={"checkpoint.from_scratch_if_missing": True},
    ),
    Ignored(
        names=("--exit-on-missing-checkpoint",),
        reason="a missing checkpoint is always an error; --from-scratch-if-missing allows it",
    ),
    Ignored(
        names=("--use-checkpoint-args",),
        reason=(
            "a resumed run has its config.toml; for another checkpoint write the [model] table, "
            "which `mds-ckpt inspect` shows"
        ),
    ),
    Refused(
        names=("--load-tag",),
        instead="name the step's folder: --load RUN/checkpoints/step-100",
    ),
    Refused(
        names=("--no-load-lr-state",),
        instead="--override-opt_param-scheduler uses the new schedule at the old progress",
    ),
    Switch(names=("--finetune",), values={"checkpoint.load_weights_only": True}),
    Switch(
        names=("--no-load-optim",),
        values={"checkpoint.load_weights_only": True},
        note="steps, schedule and data start afresh too, which the original goes on with",
    ),
    Ignored(
        names=("--no-load-rng",),
        reason="no generator's state is kept: dropout follows seed and sample",
    ),
    Ignored(
        names=("--no-save-rng",),
        reason="no generator's state is kept: dropout follows seed and sample",
    ),
    Refused(
        names=("--no-save-optim",),
        instead="checkpoints hold all of it; `mds-ckpt convert --weights-only` makes a small copy",
    ),
    Refused(
        names=("--universal-checkpoint",),
        instead="leave it out: every checkpoint here loads on any layout",
    ),
)

_WATCH: tuple[OldFlag, ...] = (
    Value(names=("--log-interval",), key="watch.log_interval"),
    Value(names=("--eval-interval",), key="watch.eval_interval"),
    Derived(
        names=("--eval-iters",),
        key="watch.eval_samples",
        needs=("train.global_batch_size",),
        compute=lambda batches, batch: int(batches) * batch,
    ),
    Ignored(
        names=("--tensorboard-dir", "--tensorboard-queue-size", "--tensorboard-log-interval"),
        takes_value=True,
        reason="every step is written to RUN_DIR/tensorboard",
    ),
    Ignored(
        names=(
            "--log-timers-to-tensorboard",
            "--log-batch-size-to-tensorboard",
            "--log-validation-ppl-to-tensorboard",
            "--log-memory-to-tensorboard",
            "--log-world-size-to-tensorboard",
            "--log-optimizer-states-to-tensorboard",
            "--no-log-learnig-rate-to-tensorboard",
            "--no-log-learning-rate-to-tensorboard",
            "--no-log-loss-scale-to-tensorboard",
            "--log-params-norm",
            "--log-num-zeros-in-grad",
            "--no-barrier-with-level-1-timing",
        ),
        reason="metrics.jsonl and RUN_DIR/tensorboard hold what is measured",
    ),
    Many(names=("--timing-log-level",), read=timing),
    Ignored(
        names=("--timing-log-option",),
        takes_value=True,
        reason="metrics.jsonl has rank 0's seconds; watch.straggler_interval compares the ranks",
    ),
    Many(names=("--wandb-project",), read=wandb),
    Value(names=("--wandb-exp-name",), key="watch.run_name"),
    Ignored(
        names=("--wandb-save-dir",),
        takes_value=True,
        reason="Weights & Biases keeps its files in RUN_DIR/wandb",
    ),
    Only(
        names=("--profile",),
        allowed=("pt", "pt-full"),
        instead="--watch.profile-steps A,B profiles steps A to B with torch's profiler",
    ),
    Many(names=("--profile-steps",), read=numbers_of("watch.profile_steps")),
    Many(names=("--profile-ranks",), read=numbers_of("watch.profile_ranks")),
)

RUN_FLAGS: tuple[OldFlag, ...] = (*_DATA, *_CHECKPOINT, *_WATCH)
