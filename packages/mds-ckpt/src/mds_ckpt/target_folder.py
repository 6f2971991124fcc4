"""Whether a folder may appear at a place: apart from the source, free, with room on its disk."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from mds_ckpt.commit import lock, settle_replaced
from mds_ckpt.errors import LockedError, MachineError, RejectedError, UsageError
from mds_ckpt.escape import printable
from mds_ckpt.files.file_operations import (
    PARTIAL,
    REAL,
    REPLACED,
    FileOperations,
    remove_tree,
)
from mds_ckpt.formats import all_formats

__all__ = ["check_apart", "check_room", "check_target", "remove_remains"]

SPARE_BYTES = 16 << 20
"""Room that a conversion leaves on the disk."""


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
