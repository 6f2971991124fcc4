"""Flags of the original for the parallel layout and for memory."""

from __future__ import annotations

from mds_train.config.megatron_conversions import (
    partition,
    seconds_text,
    virtual_stages,
    whole_text,
)
from mds_train.config.megatron_kinds import Derived, Ignored, OldFlag, Only, Refused, Switch, Value

__all__ = ["LAYOUT_FLAGS"]

_PARALLEL: tuple[OldFlag, ...] = (
    Value(names=("--tensor-model-parallel-size",), key="parallel.tp_size"),
    Value(
        names=("--model-parallel-size",),
        key="parallel.tp_size",
        note="it has been called --tensor-model-parallel-size since Megatron 2.0",
    ),
    Value(names=("--pipeline-model-parallel-size",), key="parallel.pp_size"),
    Value(names=("--pipeline-model-parallel-split-rank",), key="parallel.split_rank"),
    Value(names=("--ds-sequence-parallel-size",), key="parallel.ulysses_size"),
    Ignored(
        names=("--force-ds-sequence-parallel",),
        reason="parallel.ulysses_size alone says whether ranks share sequences",
    ),
    Value(names=("--zero-stage",), key="parallel.zero_stage", convert=whole_text, prevails=True),
    Value(
        names=("--distributed-timeout-minutes",),
        key="parallel.timeout_seconds",
        convert=seconds_text,
    ),
    Switch(names=("--use-distributed-optimizer",), values={"parallel.zero_stage": 1}),
    Ignored(names=("--no-pipeline-parallel",), reason="ZeRO 2 and 3 go with pp_size 1 as they are"),
    Ignored(names=("--deepspeed",), reason="the engine is always DeepSpeed's"),
    Value(
        names=("--deepspeed-config",),
        key="engine.deepspeed_config",
    ),
    Ignored(
        names=("--distributed-backend",), takes_value=True, reason="nccl on GPUs, gloo on CPUs"
    ),
    Ignored(names=("--local-rank",), takes_value=True, reason="the launcher's environment says it"),
    Ignored(names=("--DDP-impl",), takes_value=True, reason="the engine is always DeepSpeed's"),
    Ignored(
        names=("--lazy-mpu-init", "--use-cpu-initialization", "--no-initialization"),
        reason="initial weights depend on seed and name only",
    ),
    Ignored(
        names=(
            "--zero-contigious-gradients",
            "--zero-contiguous-gradients",
            "--zero-reduce-scatter",
        ),
        reason="DeepSpeed's buffers are chosen by the engine and change no result",
    ),
    Ignored(
        names=("--zero-reduce-bucket-size", "--zero-allgather-bucket-size"),
        takes_value=True,
        reason="DeepSpeed's buffers are chosen by the engine and change no result",
    ),
    Ignored(
        names=("--empty-unused-memory-level",),
        takes_value=True,
        reason="torch's allocator needs no such care",
    ),
    Switch(names=("--sequence-parallel",), values={"parallel.sequence_parallel": True}),
    Derived(
        names=("--num-layers-per-virtual-pipeline-stage",),
        key="parallel.virtual_stages",
        needs=("model.num_layers", "parallel.pp_size"),
        compute=virtual_stages,
    ),
    Switch(
        names=("--enable-zbh1-pipeline", "--enable-zbh1-exact-semantics"),
        values={"parallel.schedule": "zb-h1"},
    ),
    Value(names=("--pp-partition-method",), key="parallel.partition", convert=partition),
    Refused(
        names=("--standalone-embedding-stage",),
        instead='the first stage embeds; --parallel.partition "1,4,4,3" gives it fewer layers',
    ),
)

_MEMORY: tuple[OldFlag, ...] = (
    Switch(names=("--checkpoint-activations",), values={"memory.recompute": "full"}),
    Switch(names=("--recompute-activations",), values={"memory.recompute": "selective"}),
    Value(names=("--recompute-granularity",), key="memory.recompute"),
    Value(
        names=("--recompute-num-layers", "--checkpoint-num-layers"), key="memory.recompute_layers"
    ),
    Only(
        names=("--recompute-method", "--activations-checkpoint-method"),
        allowed=("uniform",),
        instead="--memory.recompute-layers N recomputes all layers, in blocks of N",
    ),
    Ignored(
        names=(
            "--deepspeed-activation-checkpointing",
            "--contigious-checkpointing",
            "--contiguous-checkpointing",
            "--synchronize-each-layer",
            "--profile-backward",
        ),
        reason="memory.recompute is torch's checkpointing, which needs no such care",
    ),
    Refused(
        names=(
            "--partition-activations",
            "--distribute-checkpointed-activations",
            "--distribute-saved-activations",
        ),
        instead="--parallel.sequence-parallel splits what is kept over the tensor-parallel ranks",
    ),
    Value(names=("--remote-device",), key="memory.offload_parameters"),
    Switch(names=("--ds-sequence-parallel-fpdt",), values={"memory.sequence_chunk": 65536}),
    Value(
        names=("--ds-sequence-parallel-fpdt-chunk-size",),
        key="memory.sequence_chunk",
        prevails=True,
    ),
    Switch(
        names=("--ds-sequence-parallel-fpdt-offloading",),
        values={"memory.offload_activations": True},
    ),
    Switch(names=("--checkpoint-in-cpu",), values={"memory.offload_activations": True}),
    Ignored(
        names=(
            "--accumulate-allreduce-grads-in-fp32",
            "--attention-softmax-in-fp32",
            "--no-query-key-layer-scaling",
        ),
        reason="it is always so",
    ),
    Ignored(
        names=(
            "--no-masked-softmax-fusion",
            "--no-bias-gelu-fusion",
            "--no-bias-dropout-fusion",
            "--no-gradient-accumulation-fusion",
            "--use-flash-attn",
            "--use-flash-attn-v2",
            "--no-async-tensor-model-parallel-allreduce",
        ),
        reason="kernels are chosen by device; `mds-kernels doctor` shows which and why",
    ),
    Value(names=("--loss-scale",), key="fp16.loss_scale"),
    Value(names=("--initial-loss-scale",), key="fp16.initial_scale"),
    Value(names=("--min-loss-scale",), key="fp16.min_scale"),
    Value(names=("--loss-scale-window",), key="fp16.window", convert=whole_text),
    Value(names=("--hysteresis",), key="fp16.hysteresis"),
)

LAYOUT_FLAGS: tuple[OldFlag, ...] = (*_PARALLEL, *_MEMORY)
