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
    dp_size: int = 1
    """Data-parallel ranks among which optimizer state is shared out, likewise."""
    ep_size: int = 1
    """Data-parallel ranks among which experts are shared out, likewise."""
    vp_size: int = 1
    """Model chunks of each pipeline stage, likewise."""
    zero_stage: int | None = None
    """How DeepSpeed shares out optimizer state and weights; None for stage 1."""
    pipeline: bool | None = None
    """Whether DeepSpeed's files are a pipeline's; None takes a pipeline wherever one can be."""
    layers_per_stage: tuple[int, ...] | None = None
    """Layers of each pipeline stage; None divides them evenly."""
    divisible_by: int | None = None
    """Pad the vocabulary to a multiple of this times tp; None takes the model's."""
    shard_bytes: int | None = None
    """Start a new file before one has more bytes, in formats of large files; 5 GB if None."""
    distributed_optimizer: bool = False
    """Write the optimizer's state as Megatron's distributed optimizer keeps it."""
    is_release: bool = False
    """Write weights to train from anew: no optimizer state, all counts 0."""


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
    asked = {
        "--tp": options.tp_size != 1,
        "--pp": options.pp_size != 1,
        **_beyond_tp_and_pp(options),
    }
    refuse_options(asked, f"{format_name} holds whole tensors")


def refuse_options(asked: Mapping[str, bool], reason: str) -> None:
    """UsageError that names the options that were given and mean nothing in a format."""
    given = [flag for flag, is_given in asked.items() if is_given]
    if given:
        raise UsageError(f"{reason}; leave {' and '.join(given)} away")


def _beyond_tp_and_pp(options: Options) -> dict[str, bool]:
    return {
        "--dp": options.dp_size != 1,
        "--ep": options.ep_size != 1,
        "--vp": options.vp_size != 1,
        "--zero-stage": options.zero_stage is not None,
        "--pipeline": options.pipeline is not None,
        "--layers-per-stage": options.layers_per_stage is not None,
        "--make-vocab-size-divisible-by": options.divisible_by is not None,
        "--use-distributed-optimizer": options.distributed_optimizer,
    }


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
