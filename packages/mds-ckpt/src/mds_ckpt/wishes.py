"""What may be asked of a conversion: every wish with its meaning, checked and sorted.

Those of the target become :class:`~mds_ckpt.plan.Options`, those of the source ReadOptions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from mds_ckpt.errors import UsageError
from mds_ckpt.files.file_operations import FileOperations
from mds_ckpt.plan import Options
from mds_ckpt.read_options import ReadOptions, Replicated
from mds_ckpt.tensors.dtype import FLOATS
from mds_ckpt.tensors.qkv import Layout

if TYPE_CHECKING:
    from mds_ckpt.encryption.keys import KeySource

__all__ = ["Wishes", "options_of", "read_options_of"]


class Wishes(TypedDict, total=False):
    """The keyword arguments of ``convert``; each may be left out."""

    source_format: str | None
    """Format of the source where it is ambiguous."""
    dtype: str | None
    """Type of the weights (``"F32"``, ``"BF16"``, ``"F16"``); each keeps its own if None. In fp32
    they are the fp32 masters, where the source has these."""
    vocab_size: int | None
    """The true vocabulary, where the source does not know it."""
    weights_only: bool
    """Leave optimizer state and counters behind."""
    allow_loss: bool
    """Go on although ``dtype`` can't hold some values."""
    overwrite: bool
    """Replace a checkpoint that is at the target already."""
    dry_run: bool
    """Check everything that can be checked without reading data, and write nothing."""
    jobs: int
    """Files written at a time."""
    max_shard_bytes: int | None
    """Start a new file before one has more bytes, in formats of large files; 5 GB if None."""
    tp: int
    """Tensor-parallel ranks of the target, in formats that are cut by ranks."""
    pp: int
    """Pipeline stages of the target, likewise."""
    dp: int
    """Data-parallel ranks among which DeepSpeed shares out optimizer state."""
    ep: int
    """Data-parallel ranks among which it shares out experts."""
    vp: int
    """Model chunks of each of Megatron's pipeline stages."""
    zero_stage: int | None
    """How DeepSpeed shares out optimizer state (0 to 3); stage 1 if None."""
    pipeline: bool | None
    """Whether DeepSpeed's files are a pipeline's; what is usual for the model if None."""
    layers_per_stage: Sequence[int] | None
    """Layers of each pipeline stage; divided evenly if None."""
    make_vocab_size_divisible_by: int | None
    """Pad the vocabulary to a multiple of this times ``tp``; the model's own number if None."""
    use_distributed_optimizer: bool
    """Write the optimizer's state as Megatron's distributed optimizer keeps it."""
    release: bool
    """Write weights to train from anew: no optimizer state, and all counts 0."""
    reset: Collection[str]
    """What begins anew: any of ``"counters"``, ``"schedule"`` and ``"rng"``."""
    key: KeySource | None
    """Where the key of an encrypted source comes from; the target is plain."""
    expect: str | None
    """SHA-256 that the (plain) manifest of an mds source must have."""
    qkv_layout: Layout | None
    """Row order of fused query, key and value weights; None detects it."""
    replicated: Replicated
    """What to do with copies of a parameter that should be equal."""
    adapter: str | Path | None
    """Folder of a LoRA adapter (peft's format) that is added to the weights."""
    operations: FileOperations
    """The disk."""


def options_of(wishes: Wishes) -> Options:
    """What is asked of the target; UsageError if it makes no sense."""
    unknown = wishes.keys() - Wishes.__annotations__.keys()
    if unknown:
        raise TypeError(f"convert() has no argument {', '.join(sorted(unknown))}")
    stages, release = wishes.get("layers_per_stage"), wishes.get("release", False)
    divisible_by, shard_bytes = (
        wishes.get("make_vocab_size_divisible_by"),
        wishes.get("max_shard_bytes"),
    )
    return Options(
        dtype=_checked_dtype(wishes.get("dtype")),
        vocab_size=wishes.get("vocab_size"),
        # The optimizer's state is not that of weights with an adapter in them.
        weights_only=wishes.get("weights_only", False)
        or release
        or wishes.get("adapter") is not None,
        jobs=_checked_count(wishes.get("jobs", 1), "--jobs"),
        allow_loss=wishes.get("allow_loss", False),
        tp_size=_checked_count(wishes.get("tp", 1), "--tp"),
        pp_size=_checked_count(wishes.get("pp", 1), "--pp"),
        dp_size=_checked_count(wishes.get("dp", 1), "--dp"),
        ep_size=_checked_count(wishes.get("ep", 1), "--ep"),
        vp_size=_checked_count(wishes.get("vp", 1), "--vp"),
        zero_stage=_checked_stage(wishes.get("zero_stage")),
        pipeline=wishes.get("pipeline"),
        layers_per_stage=None if stages is None else tuple(stages),
        divisible_by=divisible_by
        and _checked_count(divisible_by, "--make-vocab-size-divisible-by"),
        distributed_optimizer=wishes.get("use_distributed_optimizer", False),
        is_release=release,
        shard_bytes=shard_bytes and _checked_count(shard_bytes, "--max-shard-bytes", 1 << 50),
    )


def read_options_of(wishes: Wishes) -> ReadOptions:
    """What is said of the source."""
    adapter = wishes.get("adapter")
    return ReadOptions(
        vocab_size=wishes.get("vocab_size"),
        qkv_layout=wishes.get("qkv_layout"),
        replicated=wishes.get("replicated", "assert"),
        key=wishes.get("key"),
        expect=wishes.get("expect"),
        adapter=None if adapter is None else Path(adapter),
    )


def _checked_dtype(dtype: str | None) -> str | None:
    if dtype is not None and dtype not in FLOATS:
        raise UsageError(f"'{dtype}' is no type for weights; take one of {sorted(FLOATS)}")
    return dtype


def _checked_count(count: int, flag: str, most: int = 1 << 16) -> int:
    if not 1 <= count <= most:
        raise UsageError(f"{flag} is {count}; give a number from 1 on")
    return count


def _checked_stage(stage: int | None) -> int | None:
    if stage not in (None, 0, 1, 2, 3):
        raise UsageError(f"--zero-stage is {stage}; give 0, 1, 2 or 3")
    return stage
