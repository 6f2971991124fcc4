"""Opens, checks and converts checkpoints of large models, without torch and without trust."""

from __future__ import annotations

from mds_ckpt.checkpoint import Checkpoint, LazyTensor
from mds_ckpt.convert import Report, convert
from mds_ckpt.errors import (
    CheckpointError,
    LockedError,
    MachineError,
    RejectedError,
    UnknownFormatError,
    UnsupportedError,
    UsageError,
)
from mds_ckpt.formats import open_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "LazyTensor",
    "LockedError",
    "MachineError",
    "RejectedError",
    "Report",
    "UnknownFormatError",
    "UnsupportedError",
    "UsageError",
    "convert",
    "open_checkpoint",
]
