"""What must be true of the folder that is to appear."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mds_ckpt.errors import RejectedError
from mds_ckpt.files.file_operations import FileOperations
from mds_ckpt.target_folder import check_apart, check_room, remove_remains

__all__ = ["prepare_target"]


def prepare_target(
    target: Path, sources: Sequence[Path], *, nbytes: int, operations: FileOperations
) -> None:
    """Tidy up after what died on the way to ``target``, and refuse a place that can't be had.

    Args:
        target: The folder that is to appear.
        sources: Folders that are read for it.
        nbytes: What it will take.
        operations: The disk.
    """
    check_apart(target, sources)
    remove_remains(target, keep=sources[0] if sources else target, operations=operations)
    if os.path.lexists(target):
        reason = "it is there already"
        raise RejectedError(target, reason, remedy="name another folder, or remove it yourself")
    check_room(target, nbytes)
