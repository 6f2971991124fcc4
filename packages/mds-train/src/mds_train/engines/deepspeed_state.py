"""Where DeepSpeed 0.19 keeps this rank's masters and moments, for each of its optimizer classes.

Nothing is gathered: a fragment is a range of one local parameter together with views of the tensors
that the inner torch optimizer steps. Names of DeepSpeed's attributes stand in this file and in
deepspeed.py only. ``optimizer`` is ``engine.optimizer``, ``inner`` the torch optimizer inside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mds_train.engines.interface import Fragment
from mds_train.optimizers.kinds import MATRICES

__all__ = [
    "create_moments",
    "find_fragments",
    "forget_phantom_step",
    "gradients_of_partitions",
    "leave_gradients_alone",
    "names_of_stepped",
    "offloads",
    "pass_on_hyperparameters",
    "rebuild_weights",
    "set_loss_scale",
    "stepping_optimizers",
    "take_gradients",
    "whole_gradients",
]

_MOMENTS_OF_ADAM = ("exp_avg", "exp_avg_sq")
_MOMENTUM = ("momentum_buffer",)
_MOMENTS = {
    "Lion": ("exp_avg",),
    "Muon": (*_MOMENTUM, *_MOMENTS_OF_ADAM),  # one or the other, by group
    "SGD": _MOMENTUM,
}

# Name of the parameter, the parameter, range start, range length, the stepped tensor, offset in it.
_Place = tuple[str, Any, int, int, Tensor, int]


def find_fragments(optimizer: Any, inner: Any, *, names: Mapping[int, str]) -> list[Fragment]:
    """This rank's part of every parameter.

    Args:
        optimizer: DeepSpeed's optimizer.
        inner: The torch optimizer inside it.
        names: Canonical name by ``id`` of the parameter.
    """
    kind = type(optimizer).__name__
    replicated = kind not in _PARTITIONED
    places = _PARTITIONED.get(kind, _REPLICATED.get(kind, _plain_places))(optimizer, names)
    states = {
        stepped: state
        for each in stepping_optimizers(optimizer, inner)
        for stepped, state in each.state.items()
    }
    moments = _moments(inner)
    return [_fragment(place, states, moments, replicated=replicated) for place in places]


def stepping_optimizers(optimizer: Any, inner: Any) -> list[Any]:
    """The torch optimizers that step; ZeRO 3 has a second one for what is not offloaded."""
    backup = getattr(optimizer, "backup_optimizer", None)
    return [inner] if backup is None else [inner, backup]


def pass_on_hyperparameters(optimizer: Any, inner: Any) -> None:
    """Let the second one of them, if there is one, step as the first; DeepSpeed would not."""
    for other in stepping_optimizers(optimizer, inner)[1:]:
        for group, given in zip(other.param_groups, inner.param_groups, strict=True):
            group["lr"], group["weight_decay"] = given["lr"], given["weight_decay"]


def _fragment(
    place: _Place,
    states: Mapping[Tensor, Mapping[str, Any]],
    moments: Sequence[str],
    *,
    replicated: bool,
) -> Fragment:
    name, parameter, start, numel, stepped, offset = place
    state = states.get(stepped, {})
    return Fragment(
        name=name,
        start=start,
        numel=numel,
        weight=_weight(parameter, start, numel),
        master=stepped.detach().view(-1).narrow(0, offset, numel),
        moments={
            key: state[key].view(-1).narrow(0, offset, numel)
            for key in moments
            if state.get(key) is not None
        },
        replicated=replicated,
    )


def _moments(inner: Any) -> tuple[str, ...]:
    """Names of the tensors that a torch optimizer keeps beside each parameter."""
    kind = type(inner).__name__
    if kind == "SGD" and not any(group["momentum"] for group in inner.param_groups):
        return ()
    return _MOMENTS.get(kind, _MOMENTS_OF_ADAM)


def _weight(parameter: Any, start: int, numel: int) -> Tensor:
    if hasattr(parameter, "ds_tensor"):  # ZeRO-3: the part that this rank keeps begins at `start`
        return parameter.ds_tensor.detach().view(-1)[:numel]  # type: ignore[no-any-return]
    return parameter.detach().reshape(-1)[start : start + numel]  # type: ignore[no-any-return]


def _plain_places(optimizer: Any, names: Mapping[int, str]) -> Iterator[_Place]:
    """ZeRO-0 in fp32: the torch optimizer itself; the parameter is the master."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[id(parameter)], parameter, 0, parameter.numel(), parameter, 0


def _unfused_places(optimizer: Any, names: Mapping[int, str]) -> Iterator[_Place]:
    """ZeRO-0 in bf16: a master beside every parameter."""
    for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for parameter, master in zip(group, masters, strict=True):
            yield names[id(parameter)], parameter, 0, parameter.numel(), master, 0


def _stage_1_and_2_places(optimizer: Any, names: Mapping[int, str]) -> Iterator[_Place]:
    """Parameters end to end in one flat tensor per group, cut into equal parts."""
    for index, flat in enumerate(optimizer.single_partition_of_fp32_groups):
        size = int(optimizer.partition_size[index])
        low = dist.get_rank(group=optimizer.real_dp_process_group[index]) * size
        # Not param._hp_mapping: that one is wrong where round_robin_gradients reorders the group.
        group = optimizer.round_robin_bit16_groups[index]
        offsets = optimizer.round_robin_bit16_offsets[index]
        for parameter, offset in zip(group, offsets, strict=True):
            begin = max(offset, low)
            end = min(offset + parameter.numel(), low + size)
            if begin < end:
                name = names[id(parameter)]
                yield name, parameter, begin - offset, end - begin, flat, begin - low


def _bf16_places(optimizer: Any, names: Mapping[int, str]) -> Iterator[_Place]:
    """ZeRO-1 in bf16 with fp32 sums of gradients."""
    for group, flat in zip(
        optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True
    ):
        for parameter in group:
            mapping = parameter._hp_mapping
            if mapping is not None:
                local, master = mapping.lp_fragment_address, mapping.hp_fragment_address
                name = names[id(parameter)]
                yield name, parameter, local.start, local.numel, flat, master.start


def _stage_3_places(optimizer: Any, names: Mapping[int, str]) -> Iterator[_Place]:
    """Each parameter cut by itself; the last part may be padding, which holds any number."""
    for group in optimizer.fp16_groups:
        for parameter in group:
            position = optimizer.grad_position[optimizer.get_param_id(parameter)]
            sub_group, offset, part = position
            start = optimizer._get_param_partition_rank(parameter) * part
            numel = min(part, parameter.ds_numel - start)
            if numel > 0:
                flat = optimizer.fp32_partitioned_groups_flat[sub_group]
                yield names[id(parameter)], parameter, start, numel, flat, offset


_REPLICATED = {"FP16_UnfusedOptimizer": _unfused_places}
_PARTITIONED = {
    "DeepSpeedZeroOptimizer": _stage_1_and_2_places,
    "BF16_Optimizer": _bf16_places,
    "DeepSpeedZeroOptimizer_Stage3": _stage_3_places,
}


def _moments_of_group(inner: Any, group: Mapping[str, Any]) -> tuple[str, ...]:
    if type(inner).__name__ == "Muon":
        return _MOMENTUM if group["kind"] == MATRICES else _MOMENTS_OF_ADAM
    return _moments(inner)


def _groups_of_stepped(optimizer: Any, inner: Any) -> list[Any]:
    """The group of each of `stepped_tensors`."""
    groups = inner.param_groups
    kind = type(optimizer).__name__
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        parts = range(len(optimizer.fp32_partitioned_groups_flat))
        return [groups[optimizer.sub_group_to_group_id[part]] for part in parts]
    if kind in _PARTITIONED:
        return list(groups)
    return [group for group in groups for _ in group["params"]]


def names_of_stepped(
    optimizer: Any, *, names: Mapping[int, str]
) -> list[tuple[Tensor, tuple[str, ...]]]:
    """Each of `stepped_tensors` and the parameters that it is cut from, the same on all ranks."""
    parts = {
        "FP16_UnfusedOptimizer": "fp16_groups",
        "DeepSpeedZeroOptimizer": "round_robin_bit16_groups",
        "BF16_Optimizer": "bf16_groups",
        "DeepSpeedZeroOptimizer_Stage3": "fp16_groups",
    }
    kind, stepped = type(optimizer).__name__, stepped_tensors(optimizer)
    if kind not in parts:
        return [(parameter, (names[id(parameter)],)) for parameter in stepped]
    held = getattr(optimizer, parts[kind])
    if kind == "FP16_UnfusedOptimizer":
        held = [[parameter] for group in held for parameter in group]
    return [
        (tensor, tuple(names[id(parameter)] for parameter in group))
        for tensor, group in zip(stepped, held, strict=True)
    ]


def stepped_tensors(optimizer: Any) -> list[Tensor]:
    """The tensors that the inner torch optimizer steps, this rank's."""
    kind = type(optimizer).__name__
    if kind == "FP16_UnfusedOptimizer":
        return [master for group in optimizer.fp32_groups for master in group]
    if kind == "DeepSpeedZeroOptimizer":
        return list(optimizer.single_partition_of_fp32_groups)
    if kind == "BF16_Optimizer":
        return list(optimizer.fp32_groups_flat_partition)
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        return list(optimizer.fp32_partitioned_groups_flat)
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def take_gradients(optimizer: Any) -> None:
    """Hand over gradients of a backward pass that DeepSpeed did not run itself."""
    if type(optimizer).__name__ == "BF16_Optimizer":
        optimizer.update_hp_grads(clear_lp_grads=False)
        optimizer.clear_lp_grads(set_to_none=True)
    elif getattr(optimizer, "use_grad_accum_attribute", False):
        for group in optimizer.bit16_groups:
            for parameter in group:
                parameter.grad_accum, parameter.grad = parameter.grad, None
        optimizer.setup_buckets()  # the buffers, where gradients are copied to be summed


def leave_gradients_alone(optimizer: Any) -> None:
    """Take away the hooks that would sum each micro batch's gradients during a schedule."""
    for hook in getattr(optimizer, "_grad_acc_hooks", ()):
        hook.remove()


def set_loss_scale(optimizer: Any, scale: float) -> None:
    """Say what the next losses are multiplied by, and the gradients divided by."""
    if hasattr(optimizer, "loss_scale_config"):
        optimizer.loss_scale_config.cur_scale = scale
    else:
        optimizer.loss_scaler.cur_scale = scale


def whole_gradients(optimizer: Any) -> list[tuple[Any, Tensor]] | None:
    """Each parameter and its summed gradient, where every rank has them whole; else None.

    ZeRO 1 in bf16 cuts only after clipping. It would sum the norm in fp32, which on a CPU is some
    1e-3 too small, so it is not asked for it.
    """
    kind = type(optimizer).__name__
    if kind == "BF16_Optimizer":
        groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
        return [pair for group, grads in groups for pair in zip(group, grads, strict=True)]
    if kind in _PARTITIONED:
        return None
    held = getattr(optimizer, "fp16_groups", None)
    if held is None:
        held = [group["params"] for group in optimizer.param_groups]
    return [(each, each.grad) for group in held for each in group if each.grad is not None]


def gradients_of_partitions(
    optimizer: Any, *, names: Mapping[int, str]
) -> Iterator[tuple[str, Tensor]]:
    """Names and this rank's part of the summed gradients, while ZeRO 1 to 3 has them."""
    kind = type(optimizer).__name__
    if offloads(optimizer):  # they lie with the masters already
        for name, _, _, numel, stepped, offset in _PARTITIONED[kind](optimizer, names):
            if stepped.grad is not None:
                yield name, stepped.grad.view(-1).narrow(0, offset, numel)
        return
    by_part = kind == "DeepSpeedZeroOptimizer"
    groups = optimizer.params_in_partition if by_part else optimizer.fp16_groups
    for index, group in enumerate(groups):
        kept = optimizer.averaged_gradients.get(index) or ()
        own = [each for each in kept if not getattr(each, "_zero_padding", False)]
        # Padding may end the second one without being marked.
        for parameter, gradient in zip(group, own, strict=False):
            yield names[id(parameter)], gradient


def offloads(optimizer: Any) -> bool:
    """Whether masters and moments are kept in the host's memory."""
    flags = ("cpu_offload", "offload_optimizer")  # of ZeRO 1 and 2, and of ZeRO 3
    return any(getattr(optimizer, flag, False) for flag in flags)


@torch.no_grad()
def create_moments(optimizer: Any, inner: Any, *, step: int) -> None:
    """Give the torch optimizer the state of its first step, zeros; none for step 0."""
    for each in stepping_optimizers(optimizer, inner):
        each.state.clear()
    if step == 0:
        return
    groups = _groups_of_stepped(optimizer, inner)
    for index, (stepped, group) in enumerate(zip(stepped_tensors(optimizer), groups, strict=True)):
        stepping = _optimizer_of(optimizer, inner, index=index)
        moments = _moments_of_group(inner, group)
        state: dict[str, Any] = {key: torch.zeros_like(stepped).detach() for key in moments}
        stepping.state[stepped] = state
        kind = type(stepping).__name__
        if kind == "DeepSpeedCPUAdam":
            state["step"] = step
        elif "exp_avg_sq" in state:
            # The fused form keeps the count on the device of the parameter.
            state["step"] = torch.tensor(float(step), dtype=torch.float32, device=stepped.device)


def _optimizer_of(optimizer: Any, inner: Any, *, index: int) -> Any:
    """Which torch optimizer takes the step of ZeRO 3's part ``index``."""
    places = getattr(optimizer, "subgroup_to_device", {})
    if getattr(optimizer, "backup_optimizer", None) is None or places[index] == "cpu":
        return inner
    return optimizer.backup_optimizer


@torch.no_grad()
def forget_phantom_step(optimizer: Any, inner: Any) -> None:
    """Undo the update without gradients that FP16_UnfusedOptimizer makes when it is built.

    It decays the masters and counts a step before training begins.
    """
    if type(optimizer).__name__ != "FP16_UnfusedOptimizer":
        return
    inner.state.clear()
    for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for parameter, master in zip(group, masters, strict=True):
            master.copy_(parameter)


@torch.no_grad()
def rebuild_weights(optimizer: Any) -> None:
    """Make the model's weights the rounded masters. Collective for ZeRO 1 to 3."""
    kind = type(optimizer).__name__
    if kind == "FP16_UnfusedOptimizer":
        for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for parameter, master in zip(group, masters, strict=True):
                parameter.copy_(master)
    elif kind == "DeepSpeedZeroOptimizer_Stage3":
        for index, master in enumerate(optimizer.fp32_partitioned_groups_flat):
            optimizer.fp16_partitioned_groups_flat[index].data.copy_(master.data)
            optimizer._unflatten_partitioned_parameters(index)
    elif kind in _PARTITIONED:
        optimizer.update_lp_params()
