"""Flags of the original for models, tasks and machines that are not here, or not by that name.

Each is a warning that says why it does nothing, or an error that says what to write instead. Flags
that change what a run here does stand in megatron_table.
"""

from __future__ import annotations

from mds_train.config.megatron_kinds import Ignored, OldFlag, Only, Refused, Value

__all__ = ["SPECIALTIES"]


def _refused(instead: str, *names: str) -> Refused:
    return Refused(names=names, instead=instead)


_MODELS: tuple[OldFlag, ...] = (
    _refused(
        "leave it out: weights are drawn from a normal distribution, --init-method-std",
        "--init-method-xavier-uniform",
    ),
    _refused(
        "leave it out: the residual stream has the model's precision",
        "--fp32-residual-connection",
        "--embedding-weights-in-fp32",
    ),
    _refused(
        "--num-experts with --topk 1 sends every token to one expert, as a switch layer does",
        "--num-experts-switch",
    ),
    Value(names=("--load-teacher",), key="distill.teacher"),
    Value(
        names=("--kd-alpha-ce",),
        key="distill.alpha",
        note="the original reads it and leaves the cross-entropy as it is, which is 1",
    ),
    Value(names=("--kd-beta-ce",), key="distill.beta"),
    Value(names=("--kd-temp",), key="distill.temperature"),
    Ignored(
        names=("--kd", "--mos"), reason="a run learns from a teacher where --load-teacher names one"
    ),
    Ignored(
        names=(
            "--num-layers-teacher",
            "--hidden-size-teacher",
            "--num-attention-heads-teacher",
            "--num-experts-teacher",
        ),
        takes_value=True,
        reason="the teacher's shape is read from its checkpoint",
    ),
    _refused(
        "to train a checkpoint's weights from step 0, write --finetune; the optimizer's state "
        "belongs to the steps that it was made in",
        "--reset-iteration",
    ),
    _refused(
        "leave it out: retrieval models are not trained here",
        *(
            f"--retro-{name}"
            for name in (
                "add-retriever",
                "cyclic-train-iters",
                "encoder-attention-dropout",
                "encoder-hidden-dropout",
                "encoder-layers",
                "num-neighbors",
                "num-retrieved-chunks",
                "return-doc-ids",
                "workdir",
            )
        ),
        *(
            f"--{name}"
            for name in (
                "ict-head-size",
                "ict-load",
                "biencoder-projection-dim",
                "biencoder-shared-query-context-model",
                "bert-load",
                "bert-embedder-type",
                "output-bert-embeddings",
                "titles-data-path",
                "query-in-block-prob",
                "use-one-sent-docs",
                "evidence-data-path",
                "retriever-report-topk-accuracies",
                "retriever-score-scaling",
                "retriever-seq-length",
                "block-data-path",
                "embedding-path",
                "indexer-batch-size",
                "indexer-log-interval",
            )
        ),
    ),
    _refused(
        "leave it out: vision models are not trained here",
        *(
            f"--{name}"
            for name in (
                "mask-type",
                "mask-factor",
                "num-classes",
                "img-h",
                "img-w",
                "num-channels",
                "patch-dim",
                "classes-fraction",
                "data-per-class-fraction",
                "iter-per-epoch",
                "vision-pretraining",
                "vision-pretraining-type",
                "vision-backbone-type",
                "swin-backbone-type",
                "dino-bottleneck-size",
                "dino-freeze-last-layer",
                "dino-head-hidden-size",
                "dino-local-crops-number",
                "dino-local-img-size",
                "dino-norm-last-layer",
                "dino-teacher-temp",
                "dino-warmup-teacher-temp",
                "dino-warmup-teacher-temp-epochs",
            )
        ),
    ),
)

_DATA: tuple[OldFlag, ...] = (
    _refused(
        "--data.curriculum-start-length, --data.curriculum-steps grow the samples; other measures "
        "of difficulty are not used here",
        "--data-efficiency-curriculum-learning",
        "--train-idx-path",
        "--train-desc-path",
        "--train-doc-idx-path",
        "--train-sample-idx-path",
        "--train-shuffle-idx-path",
        "--train-data-exact-num-epochs",
    ),
    _refused(
        "leave it out: every layer sees every token here; --data.curriculum-start-length spares "
        "work at the start of a training",
        "--random-ltd",
    ),
    _refused(
        "write --global-batch-size, the samples of one update: --micro-batch-size times the "
        "data-parallel ranks times the accumulation",
        "--gradient-accumulation-steps",
    ),
    _refused(
        "leave it out: `mds-data split` and --data.weights choose parts of the data",
        "--sample-rate",
        "--use-dataset-only",
        "--aml-data-download-path",
    ),
    Ignored(
        names=("--return-data-index",),
        reason="every sample's number is known: it is its place in the run",
    ),
    Ignored(
        names=("--no-data-sharding", "--repeated-dataloader"),
        reason="samples are read in one computed order",
    ),
    _refused("leave it out: no code from a tokenizer's folder is ever run", "--trust-remote-code"),
)

_PRECISION: tuple[OldFlag, ...] = (
    Ignored(names=("--fp16-lm-cross-entropy",), reason="the loss is always computed in fp32"),
    _refused(
        "use --bf16: 8-bit matrix products are not used here",
        "--fp8-e4m3",
        "--fp8-hybrid",
        "--fp8-margin",
        "--fp8-interval",
        "--fp8-amax-history-len",
        "--fp8-amax-compute-algo",
        "--no-fp8-wgrad",
    ),
    Only(
        names=("--transformer-impl",),
        allowed=("local",),
        instead="leave it out: kernels are chosen by device, `mds-kernels doctor` shows which",
    ),
    Ignored(
        names=(
            "--no-persist-layer-norm",
            "--disable-mem-efficient-ln",
            "--use-flash-attn-v1",
            "--use-flash-attn-triton",
            "--use-flash-attn-builder",
        ),
        reason="kernels are chosen by device; `mds-kernels doctor` shows which and why",
    ),
)

_PARALLEL: tuple[OldFlag, ...] = (
    Ignored(
        names=(
            "--no-contiguous-buffers-in-local-ddp",
            "--no-scatter-gather-tensors-in-pipeline",
            "--overlap-p2p-communication",
            "--use-ring-exchange-p2p",
            "--use-pin-memory",
        ),
        reason="the engine chooses how it communicates, which changes no result",
    ),
    _refused(
        "leave it out: initial weights are the same whatever the layout is",
        "--data-parallel-random-init",
    ),
    _refused(
        "--parallel.zero-stage 3 cuts the weights over the ranks",
        "--memory-centric-tiled-linear",
        "--tile-factor",
        "--scattered-embeddings",
        "--split-transformers",
    ),
)

_TASKS: tuple[OldFlag, ...] = (
    _refused(
        "leave it out: `mds-train resume RUN_DIR` goes on, and a supervisor of yours may call it",
        "--adlr-autoresume",
        "--adlr-autoresume-interval",
    ),
    _refused(
        "leave it out: `mds-train generate` answers prompts",
        "--inference",
        "--ds-inference",
        "--inference-batch-times-seqlen-threshold",
        "--max-tokens-to-oom",
        "--onnx-safe",
    ),
    _refused(
        "leave it out: tasks are no part of a run; `mds-ckpt convert --to hf` makes a folder for "
        "evaluation and fine-tuning tools",
        "--task",
        "--epochs",
        "--pretrained-checkpoint",
        "--train-data",
        "--valid-data",
        "--overlapping-eval",
        "--strict-lambada",
    ),
    _refused(
        "in the original it belongs to the tasks; to keep the newest N checkpoints of a run only, "
        "write --checkpoint.keep-last N",
        "--keep-last",
    ),
)

SPECIALTIES: tuple[OldFlag, ...] = (*_MODELS, *_DATA, *_PRECISION, *_PARALLEL, *_TASKS)
"""The flags of this page."""
