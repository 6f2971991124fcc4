"""Flags of the original for the length of a run, its batches, optimizer and schedule."""

from __future__ import annotations

from mds_train.config.megatron_conversions import (
    BATCH,
    TOKENS,
    of_tokens,
    ramp,
    steps_of_samples,
    warmup_steps,
)
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

__all__ = ["TRAINING_FLAGS"]

_LENGTH: tuple[OldFlag, ...] = (
    Value(names=("--micro-batch-size",), key="train.micro_batch_size"),
    Value(
        names=("--batch-size",),
        key="train.micro_batch_size",
        note="it has been called --micro-batch-size since Megatron 2.2",
    ),
    Value(names=("--global-batch-size",), key="train.global_batch_size"),
    Value(names=("--train-iters",), key="train.train_steps"),
    Derived(
        names=("--train-samples",),
        key="train.train_steps",
        needs=BATCH,
        compute=steps_of_samples,
        smallest=True,
    ),
    Derived(
        names=("--train-tokens",),
        key="train.train_steps",
        needs=TOKENS,
        compute=of_tokens(steps_of_samples),
        smallest=True,
    ),
    Value(names=("--seed",), key="train.seed"),
    Value(names=("--clip-grad",), key="train.gradient_clipping"),
    Switch(names=("--bf16",), values={"train.precision": "bf16"}, against="--fp16"),
    Switch(names=("--fp16",), values={"train.precision": "fp16"}, against="--bf16"),
    Many(names=("--rampup-batch-size",), read=ramp),
    Value(names=("--exit-interval",), key="train.exit_interval"),
    Value(names=("--exit-duration-in-mins",), key="train.exit_minutes"),
    Value(names=("--kill-switch-file",), key="train.kill_switch_file"),
    Switch(names=("--skip-train",), values={"train.skip_train": True}),
    Ignored(
        names=("--exit-signal-handler",),
        reason="a run always saves when it is told to end (SIGTERM, SIGINT)",
    ),
)

_OPTIMIZER: tuple[OldFlag, ...] = (
    Value(
        names=("--optimizer",),
        key="optimizer.name",
        convert=lambda text: "adamw" if text == "adam" else text,
    ),
    Value(names=("--lr",), key="optimizer.lr"),
    Value(names=("--adam-beta1",), key="optimizer.beta1"),
    Value(names=("--adam-beta2",), key="optimizer.beta2"),
    Value(names=("--adam-eps",), key="optimizer.eps"),
    Value(names=("--weight-decay", "--start-weight-decay"), key="optimizer.weight_decay"),
    Value(names=("--end-weight-decay",), key="schedule.end_weight_decay"),
    Value(
        names=("--weight-decay-incr-style",),
        key="schedule.weight_decay_style",
        # constant needs no ramp: end_weight_decay stays unset and the style is never looked at
        convert=lambda text: "linear" if text == "constant" else text,
    ),
    Value(names=("--min-lr",), key="schedule.min_lr"),
    Value(names=("--lr-decay-style",), key="schedule.kind", convert=str.lower),
    Value(names=("--lr-warmup-iters",), key="schedule.warmup_steps"),
    Value(names=("--lr-warmup-init",), key="schedule.warmup_init"),
    Value(names=("--lr-decay-iters",), key="schedule.decay_steps"),
    Value(names=("--lr-wsd-decay-iters",), key="schedule.wsd_decay_steps"),
    Value(names=("--lr-wsd-decay-style",), key="schedule.wsd_decay_style"),
    Derived(
        names=("--lr-warmup-fraction", "--warmup"),
        key="schedule.warmup_steps",
        needs=("schedule.decay_steps|train.train_steps",),
        compute=lambda fraction, steps: int(fraction * steps),
    ),
    Derived(
        names=("--lr-warmup-samples",),
        key="schedule.warmup_steps",
        needs=BATCH,
        compute=warmup_steps,
    ),
    Derived(
        names=("--lr-decay-samples",),
        key="schedule.decay_steps",
        needs=BATCH,
        compute=steps_of_samples,
    ),
    Switch(names=("--legacy-lr-by-samples",), values={"schedule.by_samples": True}),
    Switch(names=("--override-opt_param-scheduler",), values={"schedule.override": True}),
    Ignored(
        names=("--use-checkpoint-opt_param-scheduler",),
        reason="a resumed run keeps its schedule unless schedule.override says otherwise",
    ),
    Derived(
        names=("--lr-warmup-tokens",),
        key="schedule.warmup_steps",
        needs=TOKENS,
        compute=of_tokens(warmup_steps),
    ),
    Derived(
        names=("--lr-decay-tokens",),
        key="schedule.decay_steps",
        needs=TOKENS,
        compute=of_tokens(steps_of_samples),
    ),
    Only(
        names=("--head-lr-mult",),
        allowed=("1", "1.0"),
        instead="leave it out: all parameters have one learning rate",
    ),
    Value(names=("--sgd-momentum",), key="optimizer.momentum"),
    Ignored(
        names=("--ds-fused-adam",),
        reason="AdamW's fused form is taken wherever torch has one",
    ),
    Refused(
        names=("--use-bnb-optimizer",),
        instead="leave it out: the optimizer's state is kept in fp32",
    ),
    Switch(
        names=("--cpu-optimizer",),
        values={
            "memory.offload_optimizer": "cpu",
            "optimizer.implementation": "deepspeed-cpu",
        },
    ),
    Switch(
        names=("--cpu-torch-adam",), values={"optimizer.implementation": "torch"}, prevails=True
    ),
)

TRAINING_FLAGS: tuple[OldFlag, ...] = (*_LENGTH, *_OPTIMIZER)
