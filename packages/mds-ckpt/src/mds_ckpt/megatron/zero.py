"""DeepSpeed's ZeRO files: which elements of which parameter each rank's flat partition holds.

Stages 1 and 2 lay a group's parameters end to end and cut the whole into equal partitions, so a
parameter may lie in several. Stage 3 cuts every parameter by itself. Padding belongs to none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mds_ckpt.megatron.assemble import TorchSource
from mds_ckpt.pickles.archive import TorchFile
from mds_ckpt.pickles.records import EnumRecord, TensorRef, as_fragment

__all__ = [
    "FlatPart",
    "LocalExperts",
    "ZeroError",
    "expert_ranks",
    "is_expert",
    "is_stage_3",
    "optimizer_state",
    "optimizer_step",
    "shapes_of",
    "split_parts",
    "stage_3_parts",
    "stage_of",
]

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


def split_parts(
    files: Sequence[TorchFile], shapes: Shapes | None, *, ep_size: int = 1
) -> Iterator[FlatPart]:
    """What the ranks of stage 1 or 2 hold, rank by rank; experts by their global numbers.

    Args:
        files: One file for each data-parallel rank, in order.
        shapes: The model file's ``param_shapes``, for files without ``param_slice_mappings``.
        ep_size: Ranks among which experts are shared out.

    Raises:
        ZeroError: The files do not say which parameters they hold.
    """
    states = [optimizer_state(file) for file in files]
    flats = [
        _flat_states(file, state, stage_3=False) for file, state in zip(files, states, strict=True)
    ]
    if all(isinstance(state.get("param_slice_mappings"), list) for state in states):
        yield from _mapped_parts(files, states, flats, ep_size)
    elif shapes is not None:
        yield from _counted_parts(files, flats, shapes, ep_size)
    else:
        raise ZeroError("neither it nor the model file says which parameters it holds")


def _mapped_parts(
    files: Sequence[TorchFile],
    states: Sequence[Mapping[str, Any]],
    flats: Sequence[list[dict[str, TensorRef]]],
    ep_size: int,
) -> Iterator[FlatPart]:
    mappings = [state["param_slice_mappings"] for state in states]
    held = (name for maps in mappings for one in maps if isinstance(one, Mapping) for name in one)
    experts = LocalExperts(held)
    done: dict[str, int] = {}
    for rank, (file, maps, groups) in enumerate(zip(files, mappings, flats, strict=True)):
        for mapping, flat in zip(maps, groups, strict=False):
            for local, record in mapping.items() if isinstance(mapping, Mapping) else ():
                fragment = as_fragment(record)
                if fragment is None or not isinstance(local, str):
                    raise ZeroError("its param_slice_mappings are not fragments")
                name = experts.global_name(local, rank % ep_size)
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
    files: Sequence[TorchFile],
    flats: Sequence[list[dict[str, TensorRef]]],
    shapes: Shapes,
    ep_size: int,
) -> Iterator[FlatPart]:
    """Without mappings: parameters lie end to end, in the order of ``param_shapes``."""
    experts = LocalExperts(name for group in shapes for name in group)
    for number, group in enumerate(shapes):
        if any(number >= len(flat) for flat in flats):
            raise ZeroError(f"it has no flat group {number}")
        # Experts are shared out among ranks first, and among those that hold the same ones then.
        count = ep_size if any(is_expert(name) for name in group) else 1
        for ep_rank in range(count):
            named = {experts.global_name(name, ep_rank): shape for name, shape in group.items()}
            mine = [flat[number] for flat in flats[ep_rank::count]]
            yield from _counted_group(files[ep_rank::count], mine, named, number)


def _counted_group(
    files: Sequence[TorchFile],
    flats: Sequence[Mapping[str, TensorRef]],
    group: Mapping[str, tuple[int, ...]],
    number: int,
) -> Iterator[FlatPart]:
    partition = max(flat[MASTER].numel for flat in flats)
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
                yield from _states(file, flats[rank], name, span, low - rank * partition)
        at = end


_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d{1,6})(\..+)")


def is_expert(name: str) -> bool:
    """Whether the engine's name of a parameter is of an expert."""
    return ".deepspeed_experts." in name


class LocalExperts:
    """How many experts of each layer a rank holds, told from the names that it uses for them.

    Args:
        names: Names of parameters as ranks call them: each counts its experts from 0.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._counts: dict[str, int] = {}
        for name in names:
            if isinstance(name, str) and (match := _EXPERT.fullmatch(name)) is not None:
                self._counts[match[1]] = max(self._counts.get(match[1], 0), int(match[2]) + 1)

    def global_name(self, name: str, ep_rank: int) -> str:
        """The name with the expert's number in the whole model; others as they are."""
        match = _EXPERT.fullmatch(name)
        if match is None or match[1] not in self._counts:
            return name
        number = int(match[2]) + ep_rank * self._counts[match[1]]
        return f"{match[1]}{number}{match[3]}"


def expert_ranks(state: Mapping[str, Any], dp_size: int, stored: int) -> int:
    """Ranks among which experts are shared out, as the partition counts tell it.

    Args:
        state: A rank's optimizer state.
        dp_size: Data-parallel ranks.
        stored: What the arguments say.
    """
    counts, maps = state.get("partition_count"), state.get("param_slice_mappings")
    if not isinstance(counts, list) or not isinstance(maps, list):
        return stored
    for count, mapping in zip(counts, maps, strict=False):
        if isinstance(mapping, Mapping) and any(is_expert(str(name)) for name in mapping):
            if type(count) is not int or count < 1 or dp_size % count:
                raise ZeroError(f"its experts are cut in {count} parts for {dp_size} ranks")
            return dp_size // count
    return stored


def stage_3_parts(files: Sequence[TorchFile], shapes: Shapes) -> Iterator[FlatPart]:
    """What the ranks of stage 3 hold: the same share of every parameter, padding at the end.

    Args:
        files: One file for each data-parallel rank, in order.
        shapes: The model file's ``param_shapes``.
    """
    if any(is_expert(name) for group in shapes for name in group):
        raise ZeroError("it has experts, whose shares in stage 3 we can't tell apart")
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
