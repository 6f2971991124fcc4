"""Opens, checks and converts checkpoints of large models, without torch and without trust."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mds_ckpt.checkpoint import Checkpoint, LazyTensor
    from mds_ckpt.conversion import Report, convert
    from mds_ckpt.diff import compare
    from mds_ckpt.encryption.keys import KeySource
    from mds_ckpt.errors import (
        CheckpointError,
        LockedError,
        MachineError,
        RejectedError,
        SealedError,
        UnknownFormatError,
        UnsupportedError,
        UsageError,
    )
    from mds_ckpt.formats import open_checkpoint
    from mds_ckpt.verification import verify

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "KeySource",
    "LazyTensor",
    "LockedError",
    "MachineError",
    "RejectedError",
    "Report",
    "SealedError",
    "UnknownFormatError",
    "UnsupportedError",
    "UsageError",
    "compare",
    "convert",
    "open_checkpoint",
    "verify",
]

# A command should not wait for what it does not use, so public names are imported at first use.
# No module may have the name of a public function: once imported, it would take its place.
_HOMES = (
    "mds_ckpt.errors",
    "mds_ckpt.checkpoint",
    "mds_ckpt.formats",
    "mds_ckpt.conversion",
    "mds_ckpt.diff",
    "mds_ckpt.verification",
    "mds_ckpt.encryption.keys",
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mds_ckpt' has no attribute {name!r}")
    for home in _HOMES:
        module = import_module(home)
        if name in vars(module):
            value = vars(module)[name]
            setattr(sys.modules[__name__], name, value)
            return value
    raise AssertionError(f"{name} has no home")


def __dir__() -> list[str]:
    return sorted(__all__)
