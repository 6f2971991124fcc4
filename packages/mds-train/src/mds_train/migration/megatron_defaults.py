"""Defaults of the original that differ from ours, and why ours differ. The docs show this table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["DIFFERENT_DEFAULTS", "DefaultDifference", "missing_defaults"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DefaultDifference:
    """One default of the original that is another one here.

    Attributes:
        flags: The original's flags, any of which takes the default's place.
        theirs: The original's default, as one would type it.
        key: Our field.
        value: What to write into it for the original's default.
        why: Why ours differs.
        needs: A flag without which the default has no meaning, perhaps with its value.
    """

    flags: tuple[str, ...]
    theirs: str
    key: str
    value: Any
    why: str
    needs: str = ""


def _difference(
    flags: str, theirs: str, key: str, value: Any, why: str, *, needs: str = ""
) -> DefaultDifference:
    return DefaultDifference(
        flags=tuple(flags.split()), theirs=theirs, key=key, value=value, why=why, needs=needs
    )


DIFFERENT_DEFAULTS: tuple[DefaultDifference, ...] = (
    _difference(
        "--hidden-dropout", "0.1", "model.hidden_dropout", 0.1, "large models train without"
    ),
    _difference(
        "--attention-dropout",
        "0.1",
        "model.attention_dropout",
        0.1,
        "large models train without, and fused attention needs 0",
    ),
    _difference(
        "--no-bias-gelu-fusion --openai-gelu --swiglu --squared-relu",
        "the fused GELU, by tanh",
        "model.activation",
        "gelu_tanh",
        "a kernel must not choose the function; --no-bias-gelu-fusion is the exact one, `gelu`",
    ),
    _difference("--adam-beta2", "0.999", "optimizer.beta2", 0.999, "0.95 is what papers use since"),
    _difference(
        "--weight-decay --start-weight-decay",
        "0.01",
        "optimizer.weight_decay",
        0.01,
        "0.1 is what papers use since",
    ),
    _difference(
        "--lr-decay-style", "linear", "schedule.kind", "linear", "cosine is what most runs ask for"
    ),
    DefaultDifference(
        flags=(),
        theirs="the schedule follows the samples",
        key="schedule.by_samples",
        value=True,
        why="it follows the applied updates, so that a skipped step does not move it",
        needs="--rampup-batch-size",
    ),
    _difference(
        "--split", "969, 30, 1", "data.split", "969,30,1", "a store says itself how it is split"
    ),
    _difference(
        "",
        "its shuffle index",
        "data.order",
        "megatron",
        '"fast" is computed, needs no cache, and keeps its order when a run is made longer',
    ),
    _difference(
        "--num-workers", "2", "data.workers", 2, "reading a store takes too little time to matter"
    ),
    _difference(
        "--eval-interval", "1000", "watch.eval_interval", 1000, "validation is asked for, or not"
    ),
    _difference("--log-interval", "100", "watch.log_interval", 100, "every step is in the metrics"),
    _difference(
        "--distributed-timeout-minutes",
        "10",
        "parallel.timeout_seconds",
        600.0,
        "a lost rank is known sooner",
    ),
    _difference(
        "--initial-loss-scale",
        "2**32",
        "fp16.initial_scale",
        2.0**32,
        "the first sixteen steps would be lost",
        needs="--fp16",
    ),
    _difference(
        "--expert-interval",
        "2",
        "model.expert_interval",
        2,
        "models with experts have them in every layer since",
        needs="--num-experts",
    ),
    _difference(
        "--moe-loss-coeff",
        "0.1",
        "model.moe_loss_coeff",
        0.1,
        "0.01 is what papers use since",
        needs="--num-experts",
    ),
    _difference(
        "--moe-train-capacity-factor --disable-moe-token-dropping",
        "1.0",
        "model.moe_capacity_factor",
        1.0,
        "no token is dropped, so results do not depend on the layout",
        needs="--num-experts",
    ),
    _difference(
        "--moe-eval-capacity-factor --disable-moe-token-dropping",
        "1.0",
        "model.moe_eval_capacity_factor",
        1.0,
        "no token is dropped",
        needs="--num-experts",
    ),
    _difference(
        "",
        "over a rank's micro batch",
        "model.moe_balance_scope",
        "micro_batch",
        "a sequence's loss does not depend on its neighbours",
        needs="--num-experts",
    ),
    _difference(
        "",
        "of first choices",
        "model.moe_balance_choices",
        "first",
        "all experts that work are to be used evenly",
        needs="--num-experts",
    ),
    DefaultDifference(
        flags=("--disable-moe-top2-2nd-expert-sampling",),
        theirs="the second expert is drawn",
        key="model.moe_sample_second",
        value=True,
        why="the most probable experts of a token are the same in training and after it",
        needs="--topk 2",
    ),
    _difference(
        "--disable-moe-token-dropping",
        "lots decide who is dropped",
        "model.moe_drop_policy",
        "random",
        "earlier tokens keep their places in training as after it",
        needs="--topk 1",
    ),
    DefaultDifference(
        flags=("--enable-expert-tensor-parallelism",),
        theirs="experts are whole on each tensor-parallel rank",
        key="parallel.expert_tensor_parallel",
        value=False,
        why="cut experts need less memory; results are equal",
        needs="--num-experts",
    ),
    _difference(
        "", "all are kept", "checkpoint.keep_last", 0, "disks are finite; 0 keeps all of them"
    ),
)


def missing_defaults(given: Sequence[str]) -> Mapping[str, tuple[Any, str]]:
    """Fields that the original's defaults would set, as value and origin.

    Args:
        given: The flags of a command line, with dashes, and each once more with its values.
    """
    return {
        item.key: (
            item.value,
            f"Megatron's default of {item.flags[0]}" if item.flags else "as Megatron has it",
        )
        for item in DIFFERENT_DEFAULTS
        if not set(item.flags) & set(given) and (not item.needs or item.needs in given)
    }
