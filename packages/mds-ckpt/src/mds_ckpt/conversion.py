"""Convert a checkpoint to another format: open, plan, check, write beside, rename.

The source is only read. The target appears by one rename, complete, or not at all.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.commit import lock, publish_folder, settle_replaced
from mds_ckpt.encryption.keys import KeySource
from mds_ckpt.errors import (
    LockedError,
    MachineError,
    RejectedError,
    UnsupportedError,
    UsageError,
)
from mds_ckpt.escape import printable
from mds_ckpt.files.file_operations import (
    PARTIAL,
    REAL,
    REPLACED,
    FileOperations,
    partial_path,
    remove_tree,
)
from mds_ckpt.files.lock import LOCK_NAME
from mds_ckpt.formats import all_formats, open_checkpoint
from mds_ckpt.plan import Loss, Options, Plan, check_accounting
from mds_ckpt.progress import RESETTABLE, without_progress
from mds_ckpt.read_options import ReadOptions, Replicated
from mds_ckpt.spelling import did_you_mean
from mds_ckpt.tensors.dtype import FLOATS
from mds_ckpt.tensors.qkv import Layout

_WHOLE = frozenset({"hf", "mds", "mcore", "torch_dist"})
"""Formats of whole tensors; with optimizer state the others look for masters themselves."""
SPARE_BYTES = 16 << 20
"""Room that a conversion leaves on the disk."""


_NAMES: Mapping[str, str] = {"mcore": "torch_dist"}
"""Other words for formats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a conversion did, or with ``dry_run`` would do."""

    source: Path
    source_format: str
    target: Path
    target_format: str
    num_read: int
    """Source tensors that were used, each once."""
    num_written: int
    """Target tensors, each set once."""
    dropped: Mapping[str, int]
    """Source tensors left behind, by state and reason."""
    nbytes: int
    losses: Sequence[Loss]
    notes: Sequence[str]
    dry_run: bool


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: str,
    source_format: str | None = None,
    dtype: str | None = None,
    vocab_size: int | None = None,
    weights_only: bool = False,
    allow_loss: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    jobs: int = 1,
    max_shard_bytes: int | None = None,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    vp: int = 1,
    zero_stage: int | None = None,
    pipeline: bool | None = None,
    layers_per_stage: Sequence[int] | None = None,
    make_vocab_size_divisible_by: int | None = None,
    use_distributed_optimizer: bool = False,
    release: bool = False,
    reset: Collection[str] = (),
    key: KeySource | None = None,
    expect: str | None = None,
    qkv_layout: Layout | None = None,
    replicated: Replicated = "assert",
    operations: FileOperations = REAL,
) -> Report:
    """Convert a checkpoint.

    Args:
        source: A checkpoint of any format that can be opened. It is never written to.
        target: The folder that is to appear.
        to: Format of the target, such as ``"hf"`` or ``"mds"``.
        source_format: Format of the source where it is ambiguous.
        dtype: Type of the weights (``"F32"``, ``"BF16"``, ``"F16"``); each keeps its own if None.
            In fp32 they are the fp32 masters, where the source has these.
        vocab_size: The true vocabulary, where the source does not know it.
        weights_only: Leave optimizer state and counters behind.
        allow_loss: Go on although ``dtype`` can't hold some values.
        overwrite: Replace a checkpoint that is at ``target`` already.
        dry_run: Check everything that can be checked without reading data, and write nothing.
        jobs: Files written at a time.
        max_shard_bytes: Start a new file before one has more bytes, in formats of large files; 5 GB
            if None.
        tp: Tensor-parallel ranks of the target, in formats that are cut by ranks.
        pp: Pipeline stages of the target, likewise.
        dp: Data-parallel ranks among which DeepSpeed shares out optimizer state.
        ep: Data-parallel ranks among which it shares out experts.
        vp: Model chunks of each of Megatron's pipeline stages.
        zero_stage: How DeepSpeed shares out optimizer state (0 to 3); stage 1 if None.
        pipeline: Whether DeepSpeed's files are a pipeline's; one wherever there can be one if None.
        layers_per_stage: Layers of each pipeline stage; divided evenly if None.
        make_vocab_size_divisible_by: Pad the vocabulary to a multiple of this times ``tp``; the
            model's own number if None.
        use_distributed_optimizer: Write the optimizer's state as Megatron's distributed optimizer
            keeps it.
        release: Write weights to train from anew: no optimizer state, and all counts 0.
        reset: What begins anew: any of ``"counters"``, ``"schedule"`` and ``"rng"``.
        key: Where the key of an encrypted source comes from; the target is plain.
        expect: SHA-256 that the (plain) manifest of an mds source must have.
        qkv_layout: Row order of fused query, key and value weights; None detects it.
        replicated: What to do with copies of a parameter that should be equal.
        operations: The disk.

    Raises:
        RejectedError: If the source is refused, or can't be expressed in the target format.
        UsageError: If the paths or options make no sense.
        MachineError: If there is too little room.
    """
    options = Options(
        dtype=_checked_dtype(dtype),
        vocab_size=vocab_size,
        weights_only=weights_only or release,
        jobs=_checked_count(jobs, "--jobs"),
        allow_loss=allow_loss,
        tp_size=_checked_count(tp, "--tp"),
        pp_size=_checked_count(pp, "--pp"),
        dp_size=_checked_count(dp, "--dp"),
        ep_size=_checked_count(ep, "--ep"),
        vp_size=_checked_count(vp, "--vp"),
        zero_stage=_checked_stage(zero_stage),
        pipeline=pipeline,
        layers_per_stage=None if layers_per_stage is None else tuple(layers_per_stage),
        divisible_by=make_vocab_size_divisible_by
        and _checked_count(make_vocab_size_divisible_by, "--make-vocab-size-divisible-by"),
        distributed_optimizer=use_distributed_optimizer,
        is_release=release,
        shard_bytes=max_shard_bytes
        and _checked_count(max_shard_bytes, "--max-shard-bytes", 1 << 50),
    )
    read_options = ReadOptions(
        vocab_size=vocab_size,
        qkv_layout=qkv_layout,
        replicated=replicated,
        key=key,
        expect=expect,
    )
    return _carried_out(
        Path(source),
        Path(target),
        to=to,
        source_format=source_format,
        options=options,
        read_options=read_options,
        reset=reset,
        overwrite=overwrite,
        dry_run=dry_run,
        operations=operations,
    )


def _carried_out(
    source: Path,
    target: Path,
    *,
    to: str,
    source_format: str | None,
    options: Options,
    read_options: ReadOptions,
    reset: Collection[str],
    overwrite: bool,
    dry_run: bool,
    operations: FileOperations,
) -> Report:
    make_plan = _planner(to)
    checkpoint = open_checkpoint(source, format=source_format, options=read_options)
    checkpoint = without_progress(checkpoint, RESETTABLE if options.is_release else reset)
    dropped: Counter[str] = Counter()
    widened = _with_masters(checkpoint, options)
    if (to in _WHOLE or options.weights_only) and widened is not checkpoint:
        dropped["weight: the fp32 masters are written in their place"] = len(checkpoint.tensors)
        checkpoint = widened
    check_apart(target, (source, checkpoint.path))
    if not dry_run:
        remove_remains(target, keep=checkpoint.path, operations=operations)
    check_target(target, overwrite=overwrite)
    plan = make_plan(checkpoint, options)
    check_accounting(checkpoint, plan)
    losses: Sequence[Loss] = ()
    if not dry_run:
        check_room(target, plan.nbytes)
        losses = _write(checkpoint, target, plan, options, operations)
    notes = [*checkpoint.notes, *_words_left_out(checkpoint, options.vocab_size), *plan.notes]
    return Report(
        source=checkpoint.path,
        source_format=checkpoint.format,
        target=target,
        target_format=to,
        num_read=len(plan.used),
        num_written=plan.num_targets,
        dropped=dropped
        + Counter(f"{state}: {reason}" for (state, _), reason in plan.dropped.items()),
        nbytes=plan.nbytes,
        losses=losses,
        notes=notes,
        dry_run=dry_run,
    )


def _with_masters(checkpoint: Checkpoint, options: Options) -> Checkpoint:
    """The checkpoint with the fp32 masters as its weights, if fp32 is asked for and they are there.

    The stored weights are the masters rounded to a narrower type.
    """
    weights, masters = checkpoint.tensors, checkpoint.states.get("master", {})
    is_narrow = any(tensor.dtype in ("BF16", "F16") for tensor in weights.values())
    if options.dtype != "F32" or not is_narrow or masters.keys() != weights.keys():
        return checkpoint
    states = {state: found for state, found in checkpoint.states.items() if state != "master"}
    return replace(checkpoint, states={**states, "weight": masters})


def _words_left_out(checkpoint: Checkpoint, vocab_size: int | None) -> Sequence[str]:
    known = checkpoint.model.vocab_size
    if vocab_size is None or vocab_size >= known:
        return ()
    what = f"{known - vocab_size} of {known} rows of the vocabulary"
    return [f"{what} are left out, as --vocab-size says; words among them are lost"]


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


def _planner(to: str) -> Callable[[Checkpoint, Options], Plan]:
    formats = all_formats()
    to = _NAMES.get(to, to)
    planners = {name: each.plan for name, each in formats.items() if each.plan is not None}
    if to not in planners:
        listed = f"'{to}' can't be written; take one of {', '.join(planners)}"
        raise UsageError(listed + did_you_mean(to, planners))
    return planners[to]


def check_apart(target: Path, sources: Sequence[Path]) -> None:
    """Refuse a target that is inside the source, or around it, or whose folder is missing."""
    if target.is_symlink():
        raise UsageError(f"{printable(str(target))} is a link; name the folder itself")
    if not target.parent.is_dir():
        raise UsageError(f"{printable(str(target.parent))} is not a folder; create it first")
    real = target.parent.resolve() / target.name
    for path in {source.resolve() for source in sources}:
        if real.is_relative_to(path) or path.is_relative_to(real):
            raise UsageError(
                f"{printable(str(target))} lies inside the source, or the source inside it; "
                f"name a folder beside it"
            )


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuse a target that is there, unless it is a checkpoint that may be replaced."""
    if not target.exists():
        return
    if not overwrite:
        remedy = "add --overwrite to replace it, or name another folder"
        raise RejectedError(target, "it is there already", remedy=remedy)
    replaceable = target.is_dir() and (
        not any(target.iterdir()) or any(f.detect(target) for f in all_formats().values())
    )
    if not replaceable:
        reason = "it is not a checkpoint and is not replaced"
        raise RejectedError(target, reason, remedy="remove it yourself")


def check_room(target: Path, nbytes: int) -> None:
    """Raise MachineError if the disk of ``target`` has no room for ``nbytes``."""
    free = shutil.disk_usage(target.parent).free
    if free < nbytes + SPARE_BYTES:
        raise MachineError(
            f"{printable(str(target.parent))} has {free} bytes free and {nbytes + SPARE_BYTES} "
            f"are needed; make room or name another disk"
        )


def _write(
    checkpoint: Checkpoint,
    target: Path,
    plan: Plan,
    options: Options,
    operations: FileOperations,
) -> Sequence[Loss]:
    partial = partial_path(target)
    operations.make_folder(partial)
    try:
        with lock(partial):
            losses = plan.write(partial, operations)
            if losses and not options.allow_loss:
                raise UnsupportedError(
                    checkpoint.path,
                    f"{options.dtype} can't hold all values: {'; '.join(map(str, losses[:8]))}",
                    remedy="choose another --dtype, or accept the loss with --allow-loss",
                )
        operations.remove(partial / LOCK_NAME)
        publish_folder(partial, target, operations=operations)
    except (Exception, KeyboardInterrupt):
        if partial.exists():
            remove_tree(partial)
        raise
    return losses


def remove_remains(target: Path, *, keep: Path, operations: FileOperations = REAL) -> None:
    """Tidy up after a conversion to ``target`` that died; one that still runs is an error."""
    for remains in sorted(target.parent.glob(f"{_literal(target.name)}{PARTIAL}*")):
        is_source = keep.resolve().is_relative_to(remains.resolve())
        if is_source or not remains.is_dir() or remains.is_symlink():
            continue
        try:
            with lock(remains):
                pass  # nobody writes into it any more
        except LockedError as error:
            raise LockedError(f"another conversion to {target} is running: {error}") from None
        remove_tree(remains, operations=operations)
    for old in sorted(target.parent.glob(f"{_literal(target.name)}{REPLACED}*")):
        if not keep.resolve().is_relative_to(old.resolve()):
            settle_replaced(old, target, operations=operations)


def _literal(name: str) -> str:
    """``name`` for a glob pattern that matches only it."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
