"""Megatron(-DeepSpeed)'s flags and what each becomes here: a field, a warning, or an error.

A warning says that the flag does nothing and why, an error what to write instead. A flag may have
several names: the original's misspelt ones and their correct twins. Dashes and underscores are
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mds_train.config.batch_growth import BatchSizes
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
from mds_train.config.megatron_specialties import SPECIALTIES
from mds_train.errors import UsageError

__all__ = ["OLD_FLAGS"]


def _float_text(text: str) -> str:
    """The original's ``--zero-stage`` is a float."""
    return text.removesuffix(".0")


def _minutes(text: str) -> str:
    try:
        return str(60 * float(text))
    except ValueError:
        return text


def _sizes(batch: int, ramp: Sequence[int] | None) -> BatchSizes:
    start, increment, samples = ramp or (batch, 1, 0)
    return BatchSizes(final=batch, start=start, increment=increment, ramp_samples=samples)


def _steps(samples: float, batch: int, ramp: Sequence[int] | None) -> int:
    steps = _sizes(batch, ramp).steps_for(int(samples))
    if steps < 1:
        raise UsageError(
            f"{int(samples)} samples are less than one global batch of {batch}; give more samples "
            "or a smaller train.global_batch_size."
        )
    return steps


def _warmup(samples: float, batch: int, ramp: Sequence[int] | None) -> int:
    return _sizes(batch, ramp).steps_for(int(samples))


def _of_tokens(
    compute: Callable[[float, int, Sequence[int] | None], int],
) -> Callable[[float, int, Sequence[int] | None, int], int]:
    """The same for a number of tokens."""
    return lambda tokens, batch, ramp, length: compute(tokens // length, batch, ramp)


def _ramp(values: Sequence[str]) -> Mapping[str, Any]:
    try:
        numbers = tuple(int(value) for value in values)
    except ValueError:
        numbers = ()
    if len(numbers) != 3:
        raise ValueError("takes three whole numbers: start, increment and samples")
    return {"train.rampup_batch_size": numbers}


def _blend(prefix: str) -> Callable[[Sequence[str]], Mapping[str, Any]]:
    """Read ``path`` or ``weight path weight path``; what a file says of them is taken back."""

    def read(values: Sequence[str]) -> Mapping[str, Any]:
        weights, paths = _weights_and_paths(values)
        one: dict[str, Any] = {"data.store": None} if not prefix else {}
        if len(paths) == 1 and not prefix:
            return {"data.store": paths[0], "data.stores": (), "data.weights": ()}
        return one | {f"data.{prefix}stores": paths, f"data.{prefix}weights": weights}

    return read


def _numbers(key: str) -> Callable[[Sequence[str]], Mapping[str, Any]]:
    """Read ``2,3`` or ``2 3``."""

    def read(values: Sequence[str]) -> Mapping[str, Any]:
        try:
            return {key: tuple(int(part) for value in values for part in value.split(",") if part)}
        except ValueError as error:
            raise ValueError("takes whole numbers") from error

    return read


def _timing(values: Sequence[str]) -> Mapping[str, Any]:
    if len(values) != 1 or values[0] not in ("0", "1", "2"):
        raise ValueError("takes 0, 1 or 2")
    return {"watch.timers": values[0] != "0"}


def _wandb(values: Sequence[str]) -> Mapping[str, Any]:
    if not values:
        raise ValueError("takes the name of a project")
    return {"watch.project": " ".join(values), "watch.trackers": ("wandb",)}


def _weights_and_paths(values: Sequence[str]) -> tuple[tuple[float, ...], tuple[str, ...]]:
    if not values:
        raise ValueError("takes a path, or weights and paths in turn")
    if len(values) == 1:
        return (), tuple(values)
    try:
        weights = tuple(float(value) for value in values[::2])
    except ValueError:
        return (), tuple(values)  # paths alone, as later versions of Megatron have it
    if len(values) % 2:
        raise ValueError("takes weights and paths in turn, but one path is missing")
    return (weights if len(weights) > 1 else ()), tuple(values[1::2])


def _virtual_stages(layers: float, num_layers: int, pp_size: int) -> int:
    count, rest = divmod(num_layers, pp_size * max(int(layers), 1))
    if rest or layers < 1:
        raise UsageError(
            f"{int(layers)} layers a virtual stage do not divide model.num_layers {num_layers} on "
            f"parallel.pp_size {pp_size} ranks evenly; --parallel.virtual-stages N with "
            f"--parallel.partition takes uneven stages too."
        )
    return count


def _partition(text: str) -> str:
    methods = {"uniform": "layers", "type:transformer": "layers", "parameters": "parameters"}
    if text.lower() not in methods:
        raise UsageError(
            f"--pp-partition-method is {text!r}, but only {', '.join(methods)} are taken over; "
            '--parallel.partition "3,5" says the number of layers of each stage.'
        )
    return methods[text.lower()]


def _experts(
    counts: Sequence[float], num_layers: int, interval: int | None
) -> Mapping[str, int | tuple[int, ...] | None]:
    """Experts of all expert layers, or of each; 1 is an MLP for all tokens."""
    numbers, step = [int(count) for count in counts], interval or 1
    if len(numbers) == 1:
        return {"model.num_experts": None if numbers == [1] else numbers[0]}
    if len(numbers) != num_layers // step:
        raise UsageError(
            f"--num-experts names {len(numbers)} layers, but with model.expert_interval {step} "
            f"(--expert-interval) {num_layers // step} of {num_layers} layers have experts; give "
            f"one number for all of them, or one for each."
        )
    layers = (0 if (layer + 1) % step else numbers[layer // step] for layer in range(num_layers))
    return {"model.num_experts": None, "model.layer_experts": tuple(layers)}


def _residual(text: str) -> str:
    values = {"standard": "false", "residual": "true"}
    if text not in values:
        raise UsageError(f"--mlp-type is {text!r}, but it must be standard or residual.")
    return values[text]


_BATCH = ("train.global_batch_size", "train.rampup_batch_size?")
_TOKENS = (*_BATCH, "data.seq_length")

_MODEL: tuple[OldFlag, ...] = (
    Value(names=("--num-layers", "--encoder-num-layers"), key="model.num_layers"),
    Value(names=("--decoder-num-layers",), key="model.decoder_num_layers"),
    Switch(names=("--bert-no-binary-head",), values={"model.binary_head": False}),
    Switch(
        names=("--apply-residual-connection-post-layernorm",),
        values={"model.residual_post_layernorm": True},
    ),
    Value(names=("--hidden-size",), key="model.hidden_size"),
    Value(names=("--ffn-hidden-size",), key="model.ffn_hidden_size"),
    Value(names=("--num-attention-heads",), key="model.num_attention_heads"),
    Value(names=("--num-key-value-heads", "--num-query-groups"), key="model.num_key_value_heads"),
    Value(names=("--kv-channels",), key="model.head_dim"),
    Value(names=("--vocab-size",), key="model.vocab_size"),
    Value(names=("--max-position-embeddings",), key="model.max_position_embeddings"),
    Value(names=("--make-vocab-size-divisible-by",), key="model.make_vocab_size_divisible_by"),
    Value(names=("--layernorm-epsilon", "--norm-epsilon"), key="model.norm_epsilon"),
    Value(names=("--normalization",), key="model.normalization", convert=str.lower),
    Value(names=("--rotary-position-embeddings-theta", "--rotary-base"), key="model.rope_theta"),
    Value(names=("--rotary-percent",), key="model.rope_percent"),
    Value(names=("--init-method-std",), key="model.init_std"),
    Value(names=("--hidden-dropout",), key="model.hidden_dropout"),
    Value(names=("--attention-dropout",), key="model.attention_dropout"),
    Switch(
        names=("--use-rotary-position-embeddings",), values={"model.position_embedding": "rope"}
    ),
    Switch(names=("--no-position-embedding",), values={"model.position_embedding": "none"}),
    Switch(
        names=("--untie-embeddings-and-output-weights",), values={"model.tie_embeddings": False}
    ),
    Switch(names=("--disable-bias-linear",), values={"model.add_bias": False}),
    Switch(names=("--add-qkv-bias",), values={"model.add_qkv_bias": True}),
    Switch(names=("--qk-layernorm",), values={"model.qk_norm": True}),
    Switch(names=("--swiglu",), values={"model.activation": "swiglu"}),
    Switch(names=("--squared-relu",), values={"model.activation": "relu2"}),
    Switch(names=("--openai-gelu",), values={"model.activation": "gelu_tanh"}),
    Switch(
        names=("--apply-layernorm-1p", "--apply-layernorm-1p-bias"),
        values={"model.zero_centered_norm": True},
    ),
)

_EXPERTS: tuple[OldFlag, ...] = (
    Derived(
        names=("--num-experts",),
        key="model.num_experts",
        needs=("model.num_layers", "model.expert_interval?"),
        compute=_experts,
        several=True,
    ),
    Value(names=("--moe-expert-parallel-size",), key="parallel.ep_size"),
    Value(names=("--expert-interval",), key="model.expert_interval"),
    Value(names=("--topk",), key="model.moe_topk"),
    Value(names=("--mlp-type",), key="model.moe_residual", convert=_residual),
    Value(names=("--moe-loss-coeff",), key="model.moe_loss_coeff"),
    Value(names=("--moe-train-capacity-factor",), key="model.moe_capacity_factor"),
    Value(names=("--moe-eval-capacity-factor",), key="model.moe_eval_capacity_factor"),
    Value(names=("--moe-min-capacity",), key="model.moe_min_capacity"),
    Switch(
        names=("--disable-moe-token-dropping",),
        values={"model.moe_capacity_factor": None, "model.moe_eval_capacity_factor": None},
    ),
    Switch(
        names=("--enable-expert-tensor-parallelism",),
        values={"parallel.expert_tensor_parallel": True},
    ),
    Ignored(
        names=("--create-moe-param-group",),
        reason="experts that ranks share out always have groups of their own",
    ),
    Ignored(
        names=("--disable-moe-top2-2nd-expert-sampling",),
        reason="a token's second expert is always the next probable one",
    ),
    Ignored(names=("--use-tutel",), reason="tokens are sent to their experts by the model itself"),
)

_LEGACY: tuple[OldFlag, ...] = (
    Switch(names=("--legacy-vocab-softmax",), values={"model.legacy_vocab_softmax": True}),
)

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
        needs=_BATCH,
        compute=_steps,
        smallest=True,
    ),
    Derived(
        names=("--train-tokens",),
        key="train.train_steps",
        needs=_TOKENS,
        compute=_of_tokens(_steps),
        smallest=True,
    ),
    Value(names=("--seed",), key="train.seed"),
    Value(names=("--clip-grad",), key="train.gradient_clipping"),
    Switch(names=("--bf16",), values={"train.precision": "bf16"}),
    Switch(names=("--fp16",), values={"train.precision": "fp16"}),
    Many(names=("--rampup-batch-size",), read=_ramp),
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
        names=("--lr-warmup-samples",), key="schedule.warmup_steps", needs=_BATCH, compute=_warmup
    ),
    Derived(
        names=("--lr-decay-samples",), key="schedule.decay_steps", needs=_BATCH, compute=_steps
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
        needs=_TOKENS,
        compute=_of_tokens(_warmup),
    ),
    Derived(
        names=("--lr-decay-tokens",),
        key="schedule.decay_steps",
        needs=_TOKENS,
        compute=_of_tokens(_steps),
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
    Switch(names=("--cpu-torch-adam",), values={"optimizer.implementation": "torch"}),
)

_PARALLEL: tuple[OldFlag, ...] = (
    Value(names=("--tensor-model-parallel-size",), key="parallel.tp_size"),
    Value(
        names=("--model-parallel-size",),
        key="parallel.tp_size",
        note="it has been called --tensor-model-parallel-size since Megatron 2.0",
    ),
    Value(names=("--pipeline-model-parallel-size",), key="parallel.pp_size"),
    Value(names=("--ds-sequence-parallel-size",), key="parallel.ulysses_size"),
    Value(names=("--zero-stage",), key="parallel.zero_stage", convert=_float_text),
    Value(
        names=("--distributed-timeout-minutes",), key="parallel.timeout_seconds", convert=_minutes
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
        compute=_virtual_stages,
    ),
    Switch(
        names=("--enable-zbh1-pipeline", "--enable-zbh1-exact-semantics"),
        values={"parallel.schedule": "zb-h1"},
    ),
    Value(names=("--pp-partition-method",), key="parallel.partition", convert=_partition),
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
    Value(names=("--loss-scale-window",), key="fp16.window", convert=_float_text),
    Value(names=("--hysteresis",), key="fp16.hysteresis"),
)

_DATA: tuple[OldFlag, ...] = (
    Many(names=("--data-path", "--train-data-path"), read=_blend("")),
    Many(names=("--valid-data-path",), read=_blend("valid_")),
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
    Switch(names=("--no-load-optim",), values={"checkpoint.load_weights_only": True}),
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
    Many(names=("--timing-log-level",), read=_timing),
    Ignored(
        names=("--timing-log-option",),
        takes_value=True,
        reason="metrics.jsonl has rank 0's seconds; watch.straggler_interval compares the ranks",
    ),
    Many(names=("--wandb-project",), read=_wandb),
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
    Many(names=("--profile-steps",), read=_numbers("watch.profile_steps")),
    Many(names=("--profile-ranks",), read=_numbers("watch.profile_ranks")),
)

OLD_FLAGS: tuple[OldFlag, ...] = (
    *_MODEL,
    *_EXPERTS,
    *_LEGACY,
    *_LENGTH,
    *_OPTIMIZER,
    *_PARALLEL,
    *_MEMORY,
    *_DATA,
    *_CHECKPOINT,
    *_WATCH,
    *SPECIALTIES,
)
"""Every flag of the original that is known here."""
