"""Read a pickle as data: opcodes are interpreted by our own machine, nothing is imported or called.

Containers and numbers become Python's own. Tensors, storages, enums, namespaces and every foreign
object become the inert records of ``mds_ckpt.pickles.records``. Opcodes that only an attack needs
are refused, and so is anything that makes the value larger, deeper or slower to walk than a real
checkpoint is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mds_ckpt.pickles.machine import Machine, PickleError, PickleLimits
from mds_ckpt.pickles.opcodes import run
from mds_ckpt.pickles.records import Namespace, Opaque, StorageRef

__all__ = ["PickleError", "PickleLimits", "Unpickled", "unpickle", "unpickle_next"]

DEFAULT_LIMITS = PickleLimits()


@dataclass(frozen=True, slots=True)
class Unpickled:
    """The value of one pickle, the storages it refers to, and the byte after its end."""

    value: Any
    storages: Mapping[str, StorageRef]
    end: int


def unpickle(data: bytes, *, limits: PickleLimits = DEFAULT_LIMITS) -> Unpickled:
    """Read the one pickle that ``data`` holds.

    Returns:
        Dictionaries, lists, tuples, sets, strings, bytes, numbers and the records of
        ``mds_ckpt.pickles.records``. The value is finite: without cycles, at most
        ``limits.depth`` deep and ``limits.nodes`` large.

    Raises:
        PickleError: The pickle is broken, names something dangerous, or is beyond the limits.
    """
    result = unpickle_next(data, 0, limits=limits)
    if result.end != len(data):
        raise PickleError(f"{len(data) - result.end} bytes follow its end at byte {result.end}")
    return result


def unpickle_next(data: bytes, start: int, *, limits: PickleLimits = DEFAULT_LIMITS) -> Unpickled:
    """Read the pickle that begins at byte ``start``; others may follow it."""
    if len(data) - start > limits.size:
        raise PickleError(f"it has {len(data) - start} bytes, over the limit of {limits.size}")
    machine = Machine(data, start, limits)
    value = run(machine)
    _check_finite(value, limits)
    return Unpickled(value, machine.storages, machine.position)


_Children = tuple[Any, ...] | list[Any]


def _children(value: Any) -> _Children:
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, Opaque):
        return (value.args, value.kwargs, value.state, value.items)
    if isinstance(value, Namespace):
        return list(value.fields.values())
    return list(value)


_CONTAINERS = frozenset((list, tuple, dict, set, frozenset, Namespace, Opaque))
"""All that can hold other values. The machine builds these themselves, never a class of theirs."""


def _check_finite(root: Any, limits: PickleLimits) -> None:
    """Refuse cycles, deep nesting, and a few bytes that stand for a value too large to walk.

    Shared values are measured once and counted each time: 40 levels of pairs of one and the same
    pair are 2**40 values.
    """
    measured: dict[int, tuple[int, int]] = {}
    open_ids: set[int] = set()
    pending: list[tuple[Any, _Children | None]] = []
    if type(root) in _CONTAINERS:
        pending.append((root, None))
    while pending:
        value, children = pending.pop()
        if children is not None:
            open_ids.discard(id(value))
            measured[id(value)] = _measure(children, measured, limits)
        elif id(value) in open_ids:
            raise PickleError("a value contains itself")
        elif id(value) not in measured:
            open_ids.add(id(value))
            if len(open_ids) > limits.depth:  # they are the value's own containers
                raise PickleError(f"containers are nested more than {limits.depth} deep")
            found = _children(value)
            pending.append((value, found))
            pending.extend((child, None) for child in found if type(child) in _CONTAINERS)


def _measure(
    children: _Children, measured: Mapping[int, tuple[int, int]], limits: PickleLimits
) -> tuple[int, int]:
    nodes, depth = 1, 0
    for child in children:
        kind = type(child)
        if kind in _CONTAINERS:
            child_nodes, child_depth = measured[id(child)]
            nodes += child_nodes
            depth = max(depth, child_depth)
        else:
            nodes += 1 + (len(child) >> 8 if kind is str or kind is bytes else 0)
    if nodes > limits.nodes:
        raise PickleError(f"one value stands for more than {limits.nodes} others")
    if depth >= limits.depth:
        raise PickleError(f"containers are nested more than {limits.depth} deep")
    return nodes, depth + 1
