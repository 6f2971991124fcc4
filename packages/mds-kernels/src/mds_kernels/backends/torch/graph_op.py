"""Ops that stay whole in a compiled graph, and a loss's objective as the plain values they take.

torch.compile would unroll a chunked loop with collectives; as a ``torch.library`` op it is one
node, and such a node takes no objects, only tensors, numbers and strings.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mds_kernels.objective import Objective

_NAMESPACE = "mds_kernels"
# Not torch.library.custom_op: its first call imports the whole compiler, seconds on every rank.
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]

Packed = tuple[list[int], list[float], str]


def graph_op(name: str, *, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register a function on tensors as ``mds_kernels::name``; ``fake`` says its results' shapes.

    It must return fresh tensors and leave its arguments alone. It has no derivative of its own.
    """

    def register(function: Callable[..., Any]) -> Any:
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_LIBRARY)
        return getattr(getattr(torch.ops, _NAMESPACE), name).default

    return register


def ops_of(kernels: str, name: str) -> Any:
    """Return the graph op ``name`` of a backend, for autograd functions that several share."""
    return getattr(getattr(torch.ops, _NAMESPACE), f"{kernels}_{name}").default


def pack(objective: Objective) -> Packed:
    """Return the objective as whole numbers, real numbers and the group's name."""
    return (
        [
            objective.vocab_start,
            objective.vocab_size,
            objective.ignore_index,
            objective.chunk_size or 0,
        ],
        [objective.label_smoothing, objective.z_loss],
        "" if objective.group is None else objective.group.group_name,
    )


def unpack(whole: Sequence[int], real: Sequence[float], group_name: str) -> Objective:
    """Return the objective that ``pack`` took apart."""
    vocab_start, vocab_size, ignore_index, chunk_size = whole
    label_smoothing, z_loss = real
    return Objective(
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        group=_group(group_name),
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        ignore_index=ignore_index,
        chunk_size=chunk_size or None,
    )


def _group(name: str) -> dist.ProcessGroup | None:
    if not name:
        return None
    # Not public in torch, but it is how torch's own functional collectives find their group.
    group: dist.ProcessGroup = distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    return group
