"""DeepSpeed's ZeRO files: which elements of which parameter each rank's flat partition holds.

Stages 1 and 2 lay a group's parameters end to end and cut the whole into equal partitions, so a
parameter may lie in several. Stage 3 cuts every parameter by itself. Padding belongs to none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mds_ckpt.megatron.assemble import TorchSource
from mds_ckpt.pickles.archive import TorchFile
from mds_ckpt.pickles.records import EnumRecord, TensorRef, as_fragment

__all__ = ["FlatPart", "ZeroError", "is_stage_3", "optimizer_step", "split_parts", "stage_3_parts"]

MASTER = "master"
Shapes = Sequence[Mapping[str, tuple[int, ...]]]
"""``param_shapes``: for each parameter group, names and local shapes in flat order."""


class ZeroError(ValueError):
    """A ZeRO file that does not say what it holds, or says it wrongly."""


@dataclass(frozen=True, slots=True)
class FlatPart:
    """Elements ``[start, stop)`` of a parameter's flattened local tensor, in one state."""

    name: str
    state: str
    start: int
    stop: int
    dtype: str
    source: TorchSource


def shapes_of(value: Any) -> Shapes | None:
    """``param_shapes`` in the form of any DeepSpeed version; None if it is not there."""
    groups = [value] if isinstance(value, Mapping) else value
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return None
    for group in groups:
        for name, shape in group.items():
            is_shape = isinstance(shape, tuple | list) and all(type(n) is int for n in shape)
            if not isinstance(name, str) or not is_shape:
                return None
    return [{name: tuple(shape) for name, shape in group.items()} for group in groups]


def optimizer_state(file: TorchFile) -> Mapping[str, Any]:
    """The ``optimizer_state_dict`` of a ZeRO file."""
    value = file.value.get("optimizer_state_dict") if isinstance(file.value, dict) else None
    if not isinstance(value, dict):
        raise ZeroError("it has no optimizer_state_dict")
    return value


def stage_of(state: Mapping[str, Any]) -> int:
    """The ZeRO stage; BF16_Optimizer's files have none and are cut as in stage 1."""
    stage = state.get("zero_stage", 1)
    number = stage.value if isinstance(stage, EnumRecord) else stage
    return number if type(number) is int else 1


def is_stage_3(state: Mapping[str, Any]) -> bool:
    """Whether every parameter was cut by itself."""
    return stage_of(state) == 3 or "fp32_flat_groups" in state


def _base_states(state: Mapping[str, Any], key: str) -> dict[int, Mapping[str, Any]]:
    """The wrapped optimizer's tensors by group, also from the elastic form (a list)."""
    base = state.get(key)
    if isinstance(base, list):
        return {i: group for i, group in enumerate(base) if isinstance(group, Mapping)}
    inner = base.get("state") if isinstance(base, Mapping) else None
    if not isinstance(inner, Mapping):
        return {}
    return {i: group for i, group in inner.items() if isinstance(group, Mapping)}


def _flat_states(
    file: TorchFile, state: Mapping[str, Any], *, stage_3: bool
) -> list[dict[str, TensorRef]]:
    """For each group the flat tensors by state: the masters, and what the optimizer keeps."""
    masters = state.get("fp32_flat_groups" if stage_3 else "single_partition_of_fp32_groups")
    if not isinstance(masters, list) or not all(isinstance(m, TensorRef) for m in masters):
        raise ZeroError("it holds no flat groups")
    base = _base_states(state, "optimizer_state_dict" if stage_3 else "base_optimizer_state")
    groups = []
    for number, master in enumerate(masters):
        kept = {
            name: tensor
            for name, tensor in base.get(number, {}).items()
            if isinstance(name, str) and isinstance(tensor, TensorRef) and tensor.shape
        }
        groups.append({MASTER: master, **kept})
    return groups


def optimizer_step(state: Mapping[str, Any]) -> TensorRef | int | None:
    """The optimizer's own count of steps, as a number or a tensor to read."""
    stored = state.get("base_optimizer_state_step")
    for key in ("base_optimizer_state", "optimizer_state_dict"):
        for group in _base_states(state, key).values():
            stored = group.get("step", stored)
    return stored if isinstance(stored, TensorRef | int) else None


def split_parts(files: Sequence[TorchFile], shapes: Shapes | None) -> Iterator[FlatPart]:
    """What the ranks of stage 1 or 2 hold, rank by rank.

    Args:
        files: One file for each data-parallel rank, in order.
        shapes: The model file's ``param_shapes``, for files without ``param_slice_mappings``.

    Raises:
        ZeroError: The files do not say which parameters they hold.
    """
    states = [optimizer_state(file) for file in files]
    flats = [
        _flat_states(file, state, stage_3=False) for file, state in zip(files, states, strict=True)
    ]
    if all(isinstance(state.get("param_slice_mappings"), list) for state in states):
        yield from _mapped_parts(files, states, flats)
    elif shapes is not None:
        yield from _counted_parts(files, flats, shapes)
    else:
        raise ZeroError("neither it nor the model file says which parameters it holds")


def _mapped_parts(
    files: Sequence[TorchFile],
    states: Sequence[Mapping[str, Any]],
    flats: Sequence[list[dict[str, TensorRef]]],
) -> Iterator[FlatPart]:
    done: dict[str, int] = {}
    for file, state, groups in zip(files, states, flats, strict=True):
        for mapping, flat in zip(state["param_slice_mappings"], groups, strict=False):
            for name, record in mapping.items() if isinstance(mapping, Mapping) else ():
                fragment = as_fragment(record)
                if fragment is None or not isinstance(name, str):
                    raise ZeroError("its param_slice_mappings are not fragments")
                first = done.get(name, 0)
                done[name] = first + fragment.numel
                yield from _states(file, flat, name, (first, done[name]), fragment.start)


def _states(
    file: TorchFile, flat: Mapping[str, TensorRef], name: str, span: tuple[int, int], at: int
) -> Iterator[FlatPart]:
    for state, tensor in flat.items():
        if at + span[1] - span[0] > tensor.numel:
            raise ZeroError(f"its {state} of '{name}' ends behind its flat group")
        yield FlatPart(name, state, *span, tensor.dtype, TorchSource(file, tensor, at))


def _counted_parts(
    files: Sequence[TorchFile], flats: Sequence[list[dict[str, TensorRef]]], shapes: Shapes
) -> Iterator[FlatPart]:
    """Without mappings: parameters lie end to end, in the order of ``param_shapes``."""
    for number, group in enumerate(shapes):
        if any(number >= len(flat) for flat in flats):
            raise ZeroError(f"it has no flat group {number}")
        partition = max(flat[number][MASTER].numel for flat in flats)
        total = sum(math.prod(shape) for shape in group.values())
        if partition * len(files) < total:
            raise ZeroError(
                f"{len(files)} partitions of {partition} elements can't hold the {total} of group "
                f"{number}"
            )
        at = 0
        for name, shape in group.items():
            end = at + math.prod(shape)
            for rank, file in enumerate(files):
                low, high = max(at, rank * partition), min(end, (rank + 1) * partition)
                if low < high:
                    span = (low - at, high - at)
                    yield from _states(
                        file, flats[rank][number], name, span, low - rank * partition
                    )
            at = end


def stage_3_parts(files: Sequence[TorchFile], shapes: Shapes) -> Iterator[FlatPart]:
    """What the ranks of stage 3 hold: the same share of every parameter, padding at the end.

    Args:
        files: One file for each data-parallel rank, in order.
        shapes: The model file's ``param_shapes``.
    """
    for rank, file in enumerate(files):
        groups = _flat_states(file, optimizer_state(file), stage_3=True)
        number, at = 0, 0
        for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
            count = math.prod(shape)
            share = -(-count // len(files))
            while number < len(groups) and at + share > groups[number][MASTER].numel:
                if at != groups[number][MASTER].numel:
                    raise ZeroError(f"'{name}' does not fit the rest of flat group {number}")
                number, at = number + 1, 0
            if number == len(groups):
                raise ZeroError(f"its flat groups end before '{name}'")
            span = (min(rank * share, count), min((rank + 1) * share, count))
            if span[0] < span[1]:
                yield from _states(file, groups[number], name, span, at)
            at += share
