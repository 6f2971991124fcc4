"""Optimizer state that is stored by number: torch's own form, and what DeepSpeed and Megatron wrap.

The files hold no names. The order is that of Megatron's two parameter groups: parameters with
weight decay in the order of the model, then biases and norms. Every shape is checked against it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mds_ckpt.megatron.assemble import TorchSource
from mds_ckpt.megatron.zero import MASTER, FlatPart, is_expert
from mds_ckpt.pickles.archive import TorchFile
from mds_ckpt.pickles.records import Global, Opaque, TensorRef

__all__ = [
    "IndexedError",
    "group_names",
    "indexed_count",
    "indexed_groups",
    "indexed_parts",
    "indexed_scaler",
    "indexed_step",
]

_MASTERS = ("fp32_groups", "fp32_from_fp16_params", "fp32_from_fp16")
_FLAT_MASTERS = "fp32_groups_flat"


class IndexedError(ValueError):
    """The numbered state does not match the model's parameters."""


def indexed_parts(
    file: TorchFile, optimizer: Any, parameters: Mapping[str, Any]
) -> Iterator[tuple[FlatPart, tuple[int, ...]]]:
    """What a rank's optimizer holds, with each parameter's local shape.

    Args:
        file: The file that ``optimizer`` is of.
        optimizer: The stored optimizer.
        parameters: The rank's parameters in the order of the model.

    Raises:
        IndexedError: The order can't be told, or a shape is not that of its parameter.
    """
    groups = _groups(parameters)
    inner = _torch_state(optimizer)
    counts = _counts(inner)
    flat = optimizer.get(_FLAT_MASTERS)
    if isinstance(flat, list):
        yield from _flat_parts(file, inner, flat, _ordered(groups, len(flat)))
        return
    matched = _match(groups, counts)
    yield from _state_parts(file, inner, matched)
    for key in _MASTERS:
        if isinstance(optimizer.get(key), list):
            yield from _master_parts(file, optimizer[key], matched)
            return


def indexed_groups(optimizer: Any) -> list[Any] | None:
    """The optimizer's parameter groups with their hyperparameters, or None."""
    for key in ("optimizer_state_dict", "optimizer"):
        if isinstance(optimizer, Mapping) and isinstance(optimizer.get(key), Mapping):
            optimizer = optimizer[key]
    groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
    return groups if isinstance(groups, list) else None


def indexed_step(file: TorchFile, optimizer: Any) -> int | None:
    """The optimizer's count of steps, or None."""
    try:
        states = _torch_state(optimizer)["state"]
    except IndexedError:
        return None
    for state in states.values():
        stored = state.get("step") if isinstance(state, Mapping) else None
        if isinstance(stored, TensorRef) and stored.numel == 1:
            return int(file.read(stored).reshape(()))
        if type(stored) is int:
            return stored
    return None


Parameter = tuple[str, TensorRef]


def _groups(parameters: Mapping[str, Any]) -> list[list[Parameter]]:
    """Megatron's groups: with weight decay, without (biases and all 1-D), then experts likewise."""
    groups: list[list[Parameter]] = [[], [], [], []]
    for name, ref in parameters.items():
        if isinstance(ref, TensorRef):
            is_plain = name.endswith(".bias") or len(ref.shape) == 1
            groups[2 * is_expert(name) + is_plain].append((name, ref))
    return groups


def group_names(parameters: Mapping[str, Any]) -> list[list[str]]:
    """The names in each of the optimizer's groups that has members."""
    return [[name for name, _ in group] for group in _groups(parameters) if group]


def indexed_count(optimizer: Any) -> int | None:
    """How many parameters the optimizer has state of; None if they lie in flat groups."""
    if not isinstance(optimizer, Mapping) or isinstance(optimizer.get(_FLAT_MASTERS), list):
        return None
    return sum(len(numbers) for numbers in _counts(_torch_state(optimizer)))


def indexed_scaler(optimizer: Any) -> Opaque | None:
    """The loss scaler as DeepSpeed's optimizers without ZeRO keep it; None if there is none."""
    if not isinstance(optimizer, Mapping) or "cur_scale" not in optimizer:
        return None
    is_dynamic = optimizer.get("dynamic_loss_scale") is True
    name = "DynamicLossScaler" if is_dynamic else "LossScaler"
    keys = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
    kept = {key: optimizer[key] for key in keys[: None if is_dynamic else 1] if key in optimizer}
    scaler = Global("deepspeed.runtime.fp16.loss_scaler", name)
    return Opaque(scaler, state={**kept, "dynamic": is_dynamic})


def _ordered(groups: list[list[Parameter]], count: int) -> list[list[Parameter]]:
    kept = [group for group in groups if group]
    if len(kept) != count:
        raise IndexedError(f"the optimizer has {count} groups and the model {len(kept)}")
    return kept


def _torch_state(optimizer: Any) -> Mapping[str, Any]:
    """The inner ``{'state': ..., 'param_groups': ...}``."""
    for key in ("optimizer_state_dict", "optimizer"):
        if isinstance(optimizer, Mapping) and isinstance(optimizer.get(key), Mapping):
            optimizer = optimizer[key]
    is_known = isinstance(optimizer, Mapping) and isinstance(optimizer.get("state"), Mapping)
    if not is_known or not isinstance(optimizer.get("param_groups"), list):
        raise IndexedError("the optimizer's state has an unknown form")
    state: Mapping[str, Any] = optimizer
    return state


def _counts(inner: Mapping[str, Any]) -> list[list[Any]]:
    numbers = []
    for group in inner["param_groups"]:
        params = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(params, list):
            raise IndexedError("a parameter group does not say which parameters it has")
        numbers.append(params)
    return numbers


def _match(
    groups: list[list[Parameter]], numbers: list[list[Any]]
) -> list[list[tuple[Any, Parameter]]]:
    """The stored numbers beside the parameters they are of."""
    kept = _ordered(groups, len(numbers))
    if [len(group) for group in kept] != [len(group) for group in numbers]:
        sizes = [len(group) for group in kept], [len(group) for group in numbers]
        raise IndexedError(
            f"the model's groups have {sizes[0]} parameters, the optimizer's {sizes[1]}"
        )
    return [list(zip(ids, group, strict=True)) for ids, group in zip(numbers, kept, strict=True)]


def _state_parts(
    file: TorchFile, inner: Mapping[str, Any], matched: list[list[tuple[Any, Parameter]]]
) -> Iterator[tuple[FlatPart, tuple[int, ...]]]:
    for number, (name, parameter) in (pair for group in matched for pair in group):
        state = inner["state"].get(number)
        for key, tensor in state.items() if isinstance(state, Mapping) else ():
            if isinstance(tensor, TensorRef) and (key != "step" or tensor.shape):
                yield _whole(file, name, key, tensor, parameter)


def _master_parts(
    file: TorchFile, masters: Sequence[Any], matched: list[list[tuple[Any, Parameter]]]
) -> Iterator[tuple[FlatPart, tuple[int, ...]]]:
    for group, pairs in zip(masters, matched, strict=False):
        if not isinstance(group, list) or len(group) != len(pairs):
            raise IndexedError("the fp32 masters are not those of the groups")
        for tensor, (_, (name, parameter)) in zip(group, pairs, strict=True):
            if not isinstance(tensor, TensorRef):
                raise IndexedError("an fp32 master is not a tensor")
            yield _whole(file, name, MASTER, tensor, parameter)


def _whole(
    file: TorchFile, name: str, state: str, tensor: TensorRef, parameter: TensorRef
) -> tuple[FlatPart, tuple[int, ...]]:
    if tensor.shape != parameter.shape:
        raise IndexedError(
            f"{state} of '{name}' has shape {list(tensor.shape)}, the parameter "
            f"{list(parameter.shape)}"
        )
    part = FlatPart(name, state, 0, tensor.numel, tensor.dtype, TorchSource(file, tensor))
    return part, parameter.shape


def _flat_parts(
    file: TorchFile,
    inner: Mapping[str, Any],
    masters: Sequence[Any],
    groups: list[list[Parameter]],
) -> Iterator[tuple[FlatPart, tuple[int, ...]]]:
    """DeepSpeed's fused form: one flat tensor a group, parameters end to end."""
    for number, (master, group) in enumerate(zip(masters, groups, strict=True)):
        kept = inner["state"].get(number)
        tensors = {MASTER: master, **(kept if isinstance(kept, Mapping) else {})}
        total = sum(math.prod(parameter.shape) for _, parameter in group)
        for state, tensor in tensors.items():
            if not isinstance(tensor, TensorRef) or not tensor.shape:
                continue
            if tensor.numel < total:
                raise IndexedError(f"{state} of group {number} is shorter than its parameters")
            at = 0
            for name, parameter in group:
                source = TorchSource(file, tensor, at)
                count = parameter.numel
                yield FlatPart(name, state, 0, count, tensor.dtype, source), parameter.shape
                at += count
