"""A conversion as a plan: what is used, what is dropped and why, how much is written, and by what.

A format that can be written makes a :class:`Plan` from an opened checkpoint. Making it reads no
tensor data, so everything that can be refused is refused before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.errors import UsageError
from mds_ckpt.files.file_operations import FileOperations
from mds_ckpt.tensors.dtype import FLOATS, numpy_dtype

if TYPE_CHECKING:
    from mds_ckpt.checkpoint import Array

Tensor = tuple[str, str]
"""State and canonical name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the user asked of a conversion beyond source and target."""

    dtype: str | None = None
    """Cast floating-point weights to this type; None keeps every tensor's own."""
    vocab_size: int | None = None
    """The true vocabulary, where the source does not know it."""
    weights_only: bool = False
    """Leave optimizer state, schedule and counters behind."""
    jobs: int = 1
    """Files written at a time."""
    allow_loss: bool = False
    """Go on although a cast turns values into infinity or zero."""
    tp_size: int = 1
    """Tensor-parallel ranks of the target, in formats that are cut by ranks."""
    pp_size: int = 1
    """Pipeline stages of the target, likewise."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Values of a tensor that a cast to a narrower type turned into something else."""

    tensor: str
    infinite: int
    zero: int

    def __str__(self) -> str:
        parts = []
        if self.infinite:
            parts.append(f"{self.infinite} beyond its largest number")
        if self.zero:
            parts.append(f"{self.zero} below its smallest (now zero)")
        return f"{self.tensor}: {', '.join(parts)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a conversion will do. ``used`` and ``dropped`` name every source tensor once."""

    used: Sequence[Tensor]
    dropped: Mapping[Tensor, str] = field(default_factory=dict)
    """Tensors that the target does not hold, and the reason."""
    num_targets: int
    """Tensors that are written."""
    nbytes: int
    """Bytes that are written, about."""
    write: Callable[[Path, FileOperations], Sequence[Loss]]
    """Fill an empty folder; returns what casts lost."""
    notes: Sequence[str] = ()
    """Sentences for the user: what was chosen, guessed or left behind."""


def check_accounting(checkpoint: Checkpoint, plan: Plan) -> None:
    """Every source tensor is used exactly once or named as dropped; ValueError if not."""
    everything = {(state, name) for state, tensors in checkpoint.states.items() for name in tensors}
    used = set(plan.used)
    if len(used) != len(plan.used):
        raise ValueError("a source tensor is used twice")
    forgotten = everything - used - plan.dropped.keys()
    if forgotten or not used <= everything or used & plan.dropped.keys():
        raise ValueError(f"source tensors are not accounted for: {sorted(forgotten)[:5]}")


def refuse_layout(options: Options, format_name: str) -> None:
    """UsageError if a layout was asked for in a format that holds whole tensors."""
    if (options.tp_size, options.pp_size) != (1, 1):
        raise UsageError(f"{format_name} holds whole tensors; leave --tp and --pp away")


def target_dtype(own: str, wanted: str | None) -> str:
    """The type in which a tensor of type ``own`` is written."""
    return wanted if wanted is not None and own in FLOATS else own


def cast(array: Array, dtype: str, *, name: str, losses: list[Loss]) -> Array:
    """``array`` in type ``dtype``; values lost to its narrower range are added to ``losses``."""
    import numpy as np

    wanted = numpy_dtype(dtype)
    if array.dtype == wanted:
        return array
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        result = array.astype(wanted)
        infinite = int(np.count_nonzero(np.isinf(result) & ~np.isinf(array)))
        zero = int(np.count_nonzero((result == 0) & (array != 0)))
    if infinite or zero:
        losses.append(Loss(name, infinite, zero))
    return result
