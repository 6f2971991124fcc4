"""Starts DeepSpeed 0.19 for a model on groups of ours. It and cpu_adam alone import deepspeed."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups as known_groups
from torch import nn
from torch.distributed import ProcessGroup

from mds_core.groups import ProcessGroups
from mds_train.optimizers.kinds import DECAYED

__all__ = ["initialize"]


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    derived: dict[str, Any],
    groups: ProcessGroups,
    has_experts: bool = False,
) -> Any:
    """DeepSpeed's engine around a model.

    Args:
        model: On its device, in the dtype of the precision.
        optimizer: Over its parameters.
        derived: DeepSpeed's JSON.
        groups: This rank's process groups.
        has_experts: Some of the optimizer's groups are of experts that ranks share out.

    Raises:
        ValueError: If DeepSpeed has chosen another kind of device, or that cannot compute so.
    """
    device = next(model.parameters()).device
    _prepare_deepspeed(device)
    if "fp16" in derived and not get_accelerator().is_fp16_supported():
        raise ValueError(
            f'train.precision is "fp16", but this {device.type} does not compute in it; use "bf16".'
        )
    _announce_experts(optimizer if has_experts else None, groups)
    # Also without tensor parallelism: DeepSpeed keeps the last unit for all engines of a process.
    unit = _ModelParallelUnit(groups)
    with _engine_with_experts() if has_experts else contextlib.nullcontext():
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=derived, mpu=unit, dist_init_required=False
        )
    return engine


def _announce_experts(optimizer: torch.optim.Optimizer | None, groups: ProcessGroups) -> None:
    """Mark experts' parameters as DeepSpeed does, and say which ranks hold the same ones.

    It averages their gradients over these ranks' sum, but over the number of all replicas.
    """
    sharers, holders = known_groups._EXPERT_PARALLEL_GROUP, known_groups._EXPERT_DATA_PARALLEL_GROUP
    sharers.clear()  # of an engine that this process had before
    holders.clear()
    for group in () if optimizer is None else optimizer.param_groups:
        if not group["expert"]:
            continue
        # DeepSpeed reads the number in the name.
        name = f"ep_size_{groups.ep_size}" + f"_{group['kind']}" * (group["kind"] != DECAYED)
        group |= {"moe": True, "name": name}
        sharers[name] = groups.ep or _group_of_one()
        holders[name] = groups.expert_dp_ulysses or _group_of_one()
        for parameter in group["params"]:
            parameter.allreduce, parameter.group_name = False, name


class _EngineWithExperts(deepspeed.DeepSpeedEngine):  # type: ignore[misc]
    """DeepSpeed asks for instances of its own layer to learn whether there are experts."""

    def _configure_distributed_model(self, model: nn.Module) -> None:
        self.has_moe_layers = True
        super()._configure_distributed_model(model)


@contextlib.contextmanager
def _engine_with_experts() -> Iterator[None]:
    """While open, `deepspeed.initialize` makes an engine that knows of experts."""
    usual = deepspeed.DeepSpeedEngine
    deepspeed.DeepSpeedEngine = _EngineWithExperts
    try:
        yield
    finally:
        deepspeed.DeepSpeedEngine = usual


def _prepare_deepspeed(device: torch.device) -> None:
    """Make DeepSpeed use torch's default group, compile nothing and be quiet."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    accelerator = get_accelerator().device_name()
    if accelerator != device.type:
        raise ValueError(
            f"the model is on {device.type}, but DeepSpeed chose the accelerator {accelerator}; "
            f"set DS_ACCELERATOR={device.type} before starting."
        )
    if device.type == "cpu":
        # This op is compiled at start-up, waits for ever on a stale lock and leaves 69 MB a rank in
        # /dev/shm; plain gloo is as exact.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    _import_muon_uncompiled()


def _import_muon_uncompiled() -> None:
    """Spare the start torch's compiler: DeepSpeed imports Muon, compiled, to ask if we use it."""
    compile_function = deepspeed.runtime.compiler.compile
    deepspeed.runtime.compiler.compile = lambda *_, **__: lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        deepspeed.runtime.compiler.compile = compile_function


def _group_of_one() -> ProcessGroup:
    """What None stands for elsewhere, as the group that DeepSpeed wants."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)  # type: ignore[no-any-return]


class _ModelParallelUnit:
    """The "mpu" through which DeepSpeed asks for Megatron's groups."""

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        # Ranks that share a sequence hold partial gradients, so they are summed over as dp is.
        self._dp = groups.dp_ulysses or _group_of_one()
        self._tp = groups.tp or _group_of_one()
        self._model = groups.model or self._tp

    def get_data_parallel_group(self) -> ProcessGroup:
        return self._dp

    def get_data_parallel_rank(self) -> int:
        return self._dp.rank()

    def get_data_parallel_world_size(self) -> int:
        return self._dp.size()

    def get_model_parallel_group(self) -> ProcessGroup:
        return self._model  # over which norms and overflows are summed: pipeline stages too

    def get_tensor_model_parallel_group(self) -> ProcessGroup:
        return self._tp

    def get_tensor_model_parallel_rank(self) -> int:
        return self._groups.tp_rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._groups.tp_size

    # The first of these ranks counts what they all hold copies of, which is so on every stage.
    get_model_parallel_rank = get_tensor_model_parallel_rank
    get_model_parallel_world_size = get_tensor_model_parallel_world_size
