"""Choose one backend for an op on a device in a dtype, and be able to say why.

What the user asked for explicitly is used or refused with the reason, never replaced. ``auto``
takes the first implementation in the registry's order that can run here.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mds_kernels.preference import BackendError, Preference, environment, preference
from mds_kernels.registry import BACKENDS, FUSED_BY_COMPILER, OPS, Implementation

__all__ = [
    "BackendError",
    "Choice",
    "check_ranks_agree",
    "implementation",
    "usable_backends",
    "why",
]


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs, who wanted it and why the others do not run."""

    op: str
    device: str
    dtype: str
    backend: str
    reason: str
    others: tuple[tuple[str, str], ...]
    """(backend, why not) of every other implementation."""

    def __str__(self) -> str:
        """Say it in sentences."""
        lines = [f"{self.op} on {self.device} in {self.dtype}: {self.backend} ({self.reason})"]
        lines += [f"  not {backend}: {reason}" for backend, reason in self.others]
        return "\n".join(lines)


def implementation(
    op: str, *, device: str, dtype: torch.dtype, backend: str | None
) -> Callable[..., Any]:
    """Return the function that runs ``op`` on a device type in a dtype.

    Raises:
        BackendError: The backend asked for can't run it.
    """
    compiling = torch.compiler.is_compiling()
    module, function = _imported(
        op, device=device, dtype=dtype, backend=backend, compiling=compiling
    )
    # torch.compile can trace this look-up, though neither an import nor a function as a constant.
    chosen: Callable[..., Any] = getattr(sys.modules[module], function)
    return chosen


def _imported(
    op: str, *, device: str, dtype: torch.dtype, backend: str | None, compiling: bool
) -> tuple[str, str]:
    """Return module, already imported, and function of the choice."""
    wish = preference(op, argument=backend)
    chosen = _choose(op, device, _name(dtype), wish, compiling=compiling)
    _load(chosen.target)
    module, function = chosen.target.split(":")
    return module, function


# A compiled graph keeps the choice of its tracing. This is what torch.compiler's
# assume_constant_result does, but that would import the compiler here.
_imported._dynamo_marked_constant = True  # type: ignore[attr-defined]


def why(
    op: str,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
    compiling: bool = False,
) -> Choice:
    """Return which backend runs ``op`` there, with the reasons.

    Args:
        op: The op's name.
        device: A device type.
        dtype: Of the op's first tensor.
        backend: As the argument of the op.
        compiling: What a call inside torch.compile gets: without a wish, plain torch for the ops
            that the compiler fuses.

    Raises:
        BackendError: The op does not exist, or the backend asked for can't run it.
    """
    if op not in OPS:
        raise BackendError(f"there is no op {op!r}; there are {', '.join(OPS)}.")
    wish = preference(op, argument=backend)
    name = _name(dtype)
    chosen = _choose(op, device, name, wish, compiling=compiling)
    others = tuple(
        (one.backend, _why_not(one, device, name) or _why_behind(one, chosen, device))
        for one in OPS[op]
        if one is not chosen
    )
    return Choice(op, device, name, chosen.backend, _reason(op, wish, compiling=compiling), others)


def usable_backends(op: str, *, device: str, dtype: torch.dtype) -> list[str]:
    """Return every backend that can run ``op`` on a device type in a dtype, on request or not."""
    return [one.backend for one in OPS[op] if _why_not(one, device, _name(dtype)) is None]


def check_ranks_agree(*, device: str, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    """Raise on every rank if two ranks would run different backends, which would diverge silently.

    A collective: all ranks of the group call it.

    Raises:
        BackendError: The ranks differ; the message names op and ranks.
    """
    # Numbers, not objects: torch needs numpy to gather those, and this package does without.
    chosen = [BACKENDS.index(why(op, device=device, dtype=dtype).backend) for op in OPS]
    mine = torch.tensor(chosen, device=device)
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    choices = [choice.tolist() for choice in everyone]
    for place, op in enumerate(OPS):
        backends = [BACKENDS[choice[place]] for choice in choices]
        if len(set(backends)) > 1:
            told = ", ".join(f"rank {rank} {name}" for rank, name in enumerate(backends))
            raise BackendError(
                f"the ranks would run different backends of {op} ({told}); set "
                f"MDS_KERNELS_{op.upper()} to one that all of them have."
            )


@functools.cache
def _choose(
    op: str, device: str, dtype: str, wish: Preference, *, compiling: bool
) -> Implementation:
    candidates = OPS[op]
    wanted = [one for one in candidates if one.backend == wish.backend]
    if wanted:
        if reason := _why_not(wanted[0], device, dtype):
            raise BackendError(
                f"{op}: {wish.origin} asks for {wish.backend}, which can't run here: {reason}. "
                f"Ask for auto to take the best that can."
            )
        return wanted[0]
    if wish.backend != "auto" and wish.for_this_op:
        raise BackendError(
            f"{op}: {wish.origin} asks for {wish.backend}, which this op does not have; it has "
            f"{', '.join(one.backend for one in candidates)}."
        )
    if compiling and op in FUSED_BY_COMPILER:
        return next(one for one in candidates if one.backend == "torch")
    automatic = (one for one in candidates if _automatic(one, device))
    return next(one for one in automatic if _why_not(one, device, dtype) is None)


def _why_not(one: Implementation, device: str, dtype: str) -> str | None:
    if one.devices is not None and device not in one.devices:
        # Prefer the reason that the user can do something about.
        elsewhere = f"it runs on {', '.join(sorted(one.devices))}, not on {device}"
        return _probe(one, device) or elsewhere
    if one.dtypes is not None and dtype not in one.dtypes:
        return f"it does not take {dtype}"
    return _probe(one, device)


def _probe(one: Implementation, device: str) -> str | None:
    if one.probe is None:
        return None
    reason: str | None = _load(one.probe)(device, environment())
    return reason


def _automatic(one: Implementation, device: str) -> bool:
    return one.automatic_on is None or device in one.automatic_on


def _why_behind(one: Implementation, chosen: Implementation, device: str) -> str:
    if not _automatic(one, device):
        return "usable, on request only"
    return f"usable, but {chosen.backend} comes first"


def _reason(op: str, wish: Preference, *, compiling: bool) -> str:
    order = [one.backend for one in OPS[op]]
    if wish.backend in order:
        return f"asked for by {wish.origin}"
    asked = "" if wish.backend == "auto" else f"{wish.origin} asks for {wish.backend}, not had; "
    if len(order) == 1:
        return f"{asked}the only one"
    if compiling and op in FUSED_BY_COMPILER:
        return f"{asked}which torch.compile fuses"
    return f"{asked}the first that can run of {', '.join(order)}"


@functools.cache
def _load(target: str) -> Callable[..., Any]:
    module, function = target.split(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
