"""The optimizer's state as DeepSpeed's ZeRO stages share it out among data-parallel ranks.

Stage 0 keeps whole tensors by number. Stages 1 and 2 lay a group's parameters end to end, pad to
twice the ranks, and give each an equal share. Stage 3 cuts every parameter by itself. Flat tensors
are promises: each parameter is read when its turn to be written comes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mds_ckpt.megatron.deepspeed_form import VERSION, DeepSpeedForm, step_tensor
from mds_ckpt.megatron.target_groups import Member, ParameterGroup
from mds_ckpt.megatron.target_layout import LocalTensor
from mds_ckpt.megatron.target_ranks import MOMENTS, RankedTarget
from mds_ckpt.pickles.records import EnumRecord, Global, Opaque
from mds_ckpt.pickles.torch_writer import StreamedArray, ordered
from mds_ckpt.tensors.dtype import ITEM_SIZES, numpy_dtype

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

Run = tuple[LocalTensor | None, int, int, int]
"""A tensor or nothing, its first and last element, and the length with padding."""

__all__ = ["FlatTensor", "flat_tensors", "stage_3_state", "whole_state", "zero_state"]

SUB_GROUP = 1_000_000_000
"""Elements of a rank's share at which stage 3 begins another flat tensor (DeepSpeed's default)."""
_FRAGMENT = Global("deepspeed.utils.tensor_fragment", "fragment_address")
_STAGE = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")


class FlatTensor(StreamedArray):
    """Runs of flattened local tensors, end to end, each padded with zeros to its length.

    Args:
        runs: What lies end to end.
        dtype: Number type of all.
    """

    def __init__(self, runs: Sequence[Run], dtype: str) -> None:
        self._runs = runs
        self._dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """One dimension."""
        return (sum(length for _, _, _, length in self._runs),)

    @property
    def dtype(self) -> Any:
        """Numpy element type."""
        return numpy_dtype(self._dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return self.shape[0] * ITEM_SIZES[self._dtype]

    def blocks(self) -> Iterator[Array]:
        """The values, a few MiB at a time."""
        import numpy as np

        for tensor, start, stop, length in self._runs:
            if tensor is not None and start < stop:
                for part in tensor.span(start, stop):
                    yield part.astype(self.dtype, copy=False)
            if (padding := length - max(0, stop - start)) > 0:
                yield np.zeros(padding, self.dtype)


def flat_tensors(value: Any) -> Iterator[FlatTensor]:
    """Every flat tensor inside nested containers."""
    if isinstance(value, FlatTensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from flat_tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flat_tensors(item)


def _scaler(target: RankedTarget) -> dict[str, Any]:
    scaler = target.loss_scaler()
    is_dynamic = scaler.cls.name == "DynamicLossScaler"
    return {"loss_scaler": scaler, "dynamic_loss_scale": is_dynamic, "overflow": False}


def zero_state(
    form: DeepSpeedForm, groups: Sequence[ParameterGroup], rank: int, dp_rank: int
) -> dict[str, Any]:
    """What a data-parallel rank holds in stages 1 and 2.

    Args:
        form: Names and tensors of the target.
        groups: The optimizer's groups on the stage, with this rank's experts.
        rank: Tensor-parallel rank.
        dp_rank: Data-parallel rank.
    """
    target, layout = form.target, form.layout
    shares, moments, paddings, mappings, counts = [], {}, [], [], []
    for number, group in enumerate(groups):
        # Experts are shared out among ranks first, and among those that hold the same ones then.
        parts = layout.ep_size if group.is_expert else 1
        count, place = layout.dp_size // parts, dp_rank // parts
        total = sum(_numel(form, member, rank) for member in group.members)
        share = (total + -total % (2 * count)) // count
        start, stop = place * share, (place + 1) * share
        # DeepSpeed stores masters without the padding of the last ranks, moments with it.
        real = max(start, min(stop, total))
        shares.append(_run(form, group, rank, "master", start, real))
        paddings.append(stop - real)
        moments[number] = {
            "step": step_tensor(target.optimizer_step),
            **{moment: _run(form, group, rank, moment, start, stop) for moment in MOMENTS},
        }
        mappings.append(_mapping(form, group, rank, start, stop))
        counts.append(count)
    return {
        **_scaler(target),
        **target.clipping(),
        "base_optimizer_state": {"state": moments, "param_groups": _flat_groups(target, groups)},
        "single_partition_of_fp32_groups": shares,
        "zero_stage": EnumRecord(_STAGE, layout.zero_stage),
        "group_paddings": paddings,
        "param_alignment_paddings": [[0] * len(group.members) for group in groups],
        "partition_count": counts,
        "ds_version": VERSION,
        "param_slice_mappings": mappings,
    }


def _numel(form: DeepSpeedForm, member: Member, rank: int) -> int:
    return math.prod(form.target.local(member.named, rank, "weight").shape)


def _flat_groups(target: RankedTarget, groups: Sequence[ParameterGroup]) -> list[dict[str, Any]]:
    return [{**target.settings(group), "params": [i]} for i, group in enumerate(groups)]


def _run(
    form: DeepSpeedForm, group: ParameterGroup, rank: int, state: str, start: int, stop: int
) -> FlatTensor:
    """Elements ``[start, stop)`` of the group's parameters laid end to end; zeros behind them."""
    runs: list[Run] = []
    at = 0
    for member in group.members:
        tensor = form.target.local(member.named, rank, state)
        count = math.prod(tensor.shape)
        low, high = max(start, at), min(stop, at + count)
        if low < high:
            runs.append((tensor, low - at, high - at, high - low))
        at += count
    if (padding := stop - max(start, min(at, stop))) > 0:
        runs.append((None, 0, 0, padding))
    return FlatTensor(runs, "F32")


def _mapping(
    form: DeepSpeedForm, group: ParameterGroup, rank: int, start: int, stop: int
) -> Opaque:
    at, mapping = 0, {}
    for member in group.members:
        count = _numel(form, member, rank)
        low, high = max(start, at), min(stop, at + count)
        if low < high:
            place = {"numel": high - low, "start": low - start}
            mapping[member.stored] = Opaque(_FRAGMENT, state=place)
        at += count
    return ordered(mapping)


def stage_3_state(
    form: DeepSpeedForm, groups: Sequence[ParameterGroup], rank: int, dp_rank: int
) -> dict[str, Any]:
    """What a data-parallel rank holds in stage 3; the arguments are those of ``zero_state``."""
    target = form.target
    flats: list[dict[str, FlatTensor]] = []
    param_groups = []
    for group in groups:
        first = len(flats)
        flats.extend(
            {
                state: FlatTensor([_share(form, m, rank, state, dp_rank) for m in members], "F32")
                for state in ("master", *MOMENTS)
            }
            for members in _sub_groups(form, group, rank)
        )
        param_groups.append({**target.settings(group), "params": list(range(first, len(flats)))})
    state = {
        number: {
            "step": step_tensor(target.optimizer_step),
            **{moment: flat[moment] for moment in MOMENTS},
        }
        for number, flat in enumerate(flats)
    }
    return {
        "zero_stage": EnumRecord(_STAGE, 3),
        **_scaler(target),
        "partition_count": form.layout.dp_size,
        "optimizer_state_dict": {"state": state, "param_groups": param_groups},
        "fp32_flat_groups": [flat["master"] for flat in flats],
    }


def _sub_groups(form: DeepSpeedForm, group: ParameterGroup, rank: int) -> Iterator[list[Member]]:
    held, filled = list[Member](), 0
    for member in group.members:
        held.append(member)
        filled += -(-_numel(form, member, rank) // form.layout.dp_size)
        if filled >= SUB_GROUP:
            yield held
            held, filled = [], 0
    if held:
        yield held


def _share(form: DeepSpeedForm, member: Member, rank: int, state: str, dp_rank: int) -> Run:
    count = form.layout.dp_size
    tensor = form.target.local(member.named, rank, state)
    total = math.prod(tensor.shape)
    share = -(-total // count)
    return tensor, min(dp_rank * share, total), min((dp_rank + 1) * share, total), share


def whole_state(form: DeepSpeedForm, groups: Sequence[ParameterGroup], rank: int) -> dict[str, Any]:
    """What the model file holds without ZeRO: torch's own state, and masters of half weights.

    Args:
        form: Names and tensors of the target.
        groups: The optimizer's groups on the stage, with this rank's experts.
        rank: Tensor-parallel rank.
    """
    target = form.target
    kept = [group for group in groups if group.members]
    members = [member for group in kept for member in group.members]
    state = {
        number: {
            "step": step_tensor(target.optimizer_step),
            **{moment: target.local(member.named, rank, moment) for moment in MOMENTS},
        }
        for number, member in enumerate(members)
    }
    param_groups, at = [], 0
    for group in kept:
        numbers = list(range(at, at + len(group.members)))
        param_groups.append({**target.settings(group), "params": numbers})
        at += len(numbers)
    inner = {"state": state, "param_groups": param_groups}
    if target.dtype == "F32":
        return inner
    return {
        **_scale_numbers(target),
        "optimizer_state_dict": inner,
        "fp32_groups": [
            [target.local(member.named, rank, "master") for member in group.members]
            for group in kept
        ],
    }


def _scale_numbers(target: RankedTarget) -> dict[str, Any]:
    """The loss scaler as DeepSpeed's optimizers without ZeRO keep it."""
    known = target.loss_scale()
    is_dynamic = str(known.get("class", "")).endswith("DynamicLossScaler")
    numbers: dict[str, Any] = {
        "dynamic_loss_scale": is_dynamic,
        "cur_scale": known.get("cur_scale", 1.0),
        "cur_iter": known.get("cur_iter", target.progress.iteration),
    }
    if is_dynamic:
        numbers |= {
            "last_overflow_iter": known.get("last_overflow_iter", -1),
            "scale_factor": known.get("scale_factor", 2.0),
            "scale_window": known.get("scale_window", 1000),
        }
    return numbers
