"""Convert a checkpoint to another format: open, plan, check, write beside, rename.

The source is only read. The target appears by one rename, complete, or not at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.commit import lock, publish_folder
from mds_ckpt.errors import UnsupportedError, UsageError
from mds_ckpt.files.file_operations import REAL, FileOperations, partial_path, remove_tree
from mds_ckpt.files.lock import LOCK_NAME
from mds_ckpt.formats import all_formats, open_checkpoint
from mds_ckpt.plan import Loss, Options, Plan, check_accounting
from mds_ckpt.progress import RESETTABLE, without_progress
from mds_ckpt.spelling import did_you_mean
from mds_ckpt.target_folder import check_apart, check_room, check_target, remove_remains
from mds_ckpt.wishes import Wishes, options_of, read_options_of

__all__ = ["Report", "convert"]

_WHOLE = frozenset({"hf", "mds", "mcore", "torch_dist"})
"""Formats of whole tensors; with optimizer state the others look for masters themselves."""
_ADAPTER = ".adapter.linear_in.weight"
"""How names of adapters end that stand beside a linear layer, as mds-train saves them."""
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


def convert(source: str | Path, target: str | Path, *, to: str, **wishes: Unpack[Wishes]) -> Report:
    """Convert a checkpoint.

    Args:
        source: A checkpoint of any format that can be opened. It is never written to.
        target: The folder that is to appear.
        to: Format of the target, such as ``"hf"`` or ``"mds"``.
        **wishes: Everything that :class:`~mds_ckpt.wishes.Wishes` lists, such as ``tp`` or
            ``dtype``.

    Raises:
        RejectedError: If the source is refused, or can't be expressed in the target format.
        UsageError: If the paths or options make no sense.
        MachineError: If there is too little room.
    """
    source, target = Path(source), Path(target)
    options, operations = options_of(wishes), wishes.get("operations", REAL)
    make_plan = _planner(to)
    checkpoint, dropped = _opened(source, to, wishes, options)
    _refuse_adapters(checkpoint, to)
    check_apart(target, (source, checkpoint.path))
    dry_run = wishes.get("dry_run", False)
    if not dry_run:
        remove_remains(target, keep=checkpoint.path, operations=operations)
    check_target(target, overwrite=wishes.get("overwrite", False))
    plan = make_plan(checkpoint, options)
    check_accounting(checkpoint, plan)
    losses: Sequence[Loss] = ()
    if not dry_run:
        check_room(target, plan.nbytes)
        losses = _write(checkpoint, target, plan, options, operations)
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
        notes=[*checkpoint.notes, *_words_left_out(checkpoint, options.vocab_size), *plan.notes],
        dry_run=dry_run,
    )


def _opened(
    source: Path, to: str, wishes: Wishes, options: Options
) -> tuple[Checkpoint, Counter[str]]:
    """The source as it is to be written, and what of it was left behind for that."""
    checkpoint = open_checkpoint(
        source, format=wishes.get("source_format"), options=read_options_of(wishes)
    )
    reset = RESETTABLE if options.is_release else wishes.get("reset", ())
    checkpoint = without_progress(checkpoint, reset)
    widened = _with_masters(checkpoint, options)
    if widened is checkpoint or not (to in _WHOLE or options.weights_only):
        return checkpoint, Counter()
    reason = "weight: the fp32 masters are written in their place"
    return widened, Counter({reason: len(checkpoint.states["master"])})


def _refuse_adapters(checkpoint: Checkpoint, to: str) -> None:
    """UnsupportedError for adapters without their model, which only our own format holds."""
    if to == "mds" or not any(name.endswith(_ADAPTER) for name in checkpoint.tensors):
        return
    config = checkpoint.training.get("config") or {}
    base = (config.get("checkpoint") or {}).get("load") or "the model that they were trained beside"
    raise UnsupportedError(
        checkpoint.path,
        "it holds the adapters of a run with LoRA without the model that they were trained beside",
        remedy=f"convert {base} with --adapter and the folder 'adapter' that the run wrote",
    )


def _with_masters(checkpoint: Checkpoint, options: Options) -> Checkpoint:
    """The checkpoint with the fp32 masters as its weights, if fp32 is asked for and they are there.

    The stored weights are the masters rounded to a narrower type. Frozen parameters and buffers
    have no masters.
    """
    weights, masters = checkpoint.tensors, checkpoint.states.get("master", {})
    is_narrow = any(tensor.dtype in ("BF16", "F16") for tensor in weights.values())
    is_known = bool(masters) and masters.keys() <= weights.keys()
    if options.dtype != "F32" or not is_narrow or not is_known:
        return checkpoint
    states = {state: found for state, found in checkpoint.states.items() if state != "master"}
    return replace(checkpoint, states={**states, "weight": {**weights, **masters}})


def _words_left_out(checkpoint: Checkpoint, vocab_size: int | None) -> Sequence[str]:
    known = checkpoint.model.vocab_size
    if vocab_size is None or vocab_size >= known:
        return ()
    what = f"{known - vocab_size} of {known} rows of the vocabulary"
    return [f"{what} are left out, as --vocab-size says; words among them are lost"]


def _planner(to: str) -> Callable[[Checkpoint, Options], Plan]:
    formats = all_formats()
    to = _NAMES.get(to, to)
    planners = {name: each.plan for name, each in formats.items() if each.plan is not None}
    if to not in planners:
        listed = f"'{to}' can't be written; take one of {', '.join(planners)}"
        raise UsageError(listed + did_you_mean(to, planners))
    return planners[to]


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
