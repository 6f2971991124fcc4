"""The engine on DeepSpeed 0.19, ZeRO 0 to 3, no pipeline. Only this file imports deepspeed."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mds_core.groups import ProcessGroups
from mds_core.rng import DropoutKey
from mds_train.batches import MicroBatch
from mds_train.config import TrainConfig
from mds_train.engines.deepspeed_config import deepspeed_config
from mds_train.engines.deepspeed_state import (
    create_moments,
    find_fragments,
    forget_phantom_step,
    rebuild_weights,
)
from mds_train.engines.interface import Fragment, OptimizerState, Update
from mds_train.optimizer import build_optimizer, set_hyperparameters

__all__ = ["DeepSpeedEngine"]

logger = logging.getLogger(__name__)


class DeepSpeedEngine:
    """Forward, backward and update of one model by DeepSpeed.

    Args:
        model: The model on its device, in the dtype of the precision.
        config: The run.
        groups: This rank's process groups.
        split_names: Canonical names of the parameters that tensor-parallel ranks hold parts of.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        config: TrainConfig,
        groups: ProcessGroups,
        split_names: frozenset[str],
    ) -> None:
        self._groups = groups
        self._seed = config.train.seed
        self._clipping = config.train.gradient_clipping
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            # DeepSpeed reads this mark where it counts a parameter into the gradient norm.
            parameter.tensor_model_parallel = name in split_names  # type: ignore[attr-defined]
        optimizer = build_optimizer(model.named_parameters(), config=config.optimizer)
        on_cpu = next(model.parameters()).device.type == "cpu"
        replicas = groups.dp_size * groups.ulysses_size
        derived = deepspeed_config(config, dp_size=groups.dp_size, replicas=replicas, on_cpu=on_cpu)
        self._engine = _initialize(model, optimizer, derived=derived, groups=groups)
        self._stage = config.parallel.zero_stage
        self._group_names = [list(group["names"]) for group in optimizer.param_groups]
        forget_phantom_step(self._engine.optimizer, self._inner)
        if self._stage == 0 and config.train.precision == "bf16":
            _sum_gradients_in_fp32(self.module)

    @property
    def _inner(self) -> torch.optim.Optimizer:
        return self._engine.basic_optimizer  # type: ignore[no-any-return]

    @property
    def module(self) -> nn.Module:
        """The model itself."""
        return self._engine.module  # type: ignore[no-any-return]

    def accumulate(self, batch: Sequence[MicroBatch], *, weight: float) -> Tensor:
        """Run forward and backward over the micro batches; see `Engine.accumulate`."""
        self._expect(len(batch))
        total = torch.zeros((), dtype=torch.float64, device=batch[0].tokens.device)
        for index, micro in enumerate(batch):
            key = DropoutKey(seed=self._seed, samples=micro.samples)
            output = self._call(micro, dropout_key=key)
            self.backward(output.loss_sum * weight, last=index == len(batch) - 1)
            total += _masked_sum(output.losses, micro)
        return total

    def _expect(self, micro_batches: int) -> None:
        """Tell DeepSpeed how many micro batches this step has, where that has changed."""
        engine = self._engine
        if micro_batches != engine.gradient_accumulation_steps():
            replicas = engine.train_batch_size() // (
                engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
            )
            size = engine.train_micro_batch_size_per_gpu() * replicas * micro_batches
            engine.set_train_batch_size(size)
            engine.micro_steps = engine.global_steps * micro_batches  # it counts to the boundary

    def losses(self, batch: Sequence[MicroBatch]) -> Tensor:
        """Run the micro batches forward only; see `Engine.losses`."""
        total = torch.zeros((), dtype=torch.float64, device=batch[0].tokens.device)
        for micro in batch:
            total += _masked_sum(self._call(micro, dropout_key=None).losses, micro)
        return total

    def _call(self, micro: MicroBatch, *, dropout_key: DropoutKey | None) -> Any:
        return self.forward(
            micro.tokens,
            micro.labels,
            loss_mask=micro.loss_mask,
            position_ids=micro.position_ids,
            dropout_key=dropout_key,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model through DeepSpeed's hooks."""
        return self._engine(*args, **kwargs)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add one micro batch's gradients; after the last one they are summed over the ranks."""
        # The loss carries its weight already, so DeepSpeed must not divide by the micro batches.
        self._engine.backward(loss, scale_wrt_gas=False)
        if not last:
            self._engine.step()  # only counts: the boundary is at the last micro batch

    def step(self, *, lr: float, weight_decay: float) -> Update:
        """Clip by the global norm and update; see `Engine.step`."""
        set_hyperparameters(self._inner, lr=lr, weight_decay=weight_decay)
        norm = self._clip_whole_gradients() if self._stage == 0 else None
        if norm is not None and not math.isfinite(norm):
            self._skip()
            return Update(grad_norm=norm, applied=False)
        self._engine.step()
        applied = bool(self._engine.was_step_applied())
        if norm is None:
            norm = float(self._engine.get_global_grad_norm())
        return Update(grad_norm=norm, applied=applied)

    def _clip_whole_gradients(self) -> float:
        """Without ZeRO every rank has all gradients of its tensor-parallel part."""
        counted: list[Tensor] = []
        others: list[Tensor] = []
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                split = parameter.tensor_model_parallel  # type: ignore[attr-defined]
                here = split or self._groups.tp_rank == 0
                (counted if here else others).append(parameter.grad)
        norm = _global_norm(counted, group=self._groups.tp)
        if self._clipping and math.isfinite(norm) and norm > self._clipping:
            torch._foreach_mul_([*counted, *others], self._clipping / (norm + 1e-6))
        return norm

    def _skip(self) -> None:
        """What DeepSpeed does itself for ZeRO 1 to 3: forget the gradients, count the step."""
        self._engine.zero_grad()
        self._engine.micro_steps += 1
        self._engine.global_steps += 1
        self._engine.skipped_steps += 1

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode without gradients."""
        self._engine.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._engine.train()

    def fragments(self) -> Sequence[Fragment]:
        """This rank's parts of all parameters, right after a step."""
        if self._engine.micro_steps % self._engine.gradient_accumulation_steps():
            raise RuntimeError("A step is half done: its summed gradients would be lost in a save.")
        return find_fragments(self._engine.optimizer, self._inner, names=self._names)

    def optimizer_state(self) -> OptimizerState:
        """Count of updates and hyperparameters."""
        steps = {int(state["step"]) for state in self._inner.state.values() if "step" in state}
        if len(steps) > 1:
            raise RuntimeError(f"The optimizer counts differ between parameters: {sorted(steps)}.")
        keys = ("name", "lr", "weight_decay", "betas", "eps")
        groups = [
            {key: group[key] for key in keys} | {"parameters": names}
            for group, names in zip(self._inner.param_groups, self._group_names, strict=True)
        ]
        return OptimizerState(name="adamw", step=steps.pop() if steps else 0, groups=groups)

    @contextmanager
    def restoring(self, *, optimizer_step: int, iterations: int) -> Iterator[Sequence[Fragment]]:
        """Give fragments to fill; see `Engine.restoring`."""
        optimizer = self._engine.optimizer
        partitioned_weights = hasattr(optimizer, "checkpoint_event_prologue") and self._stage == 3
        if partitioned_weights:
            optimizer.checkpoint_event_prologue()
        create_moments(optimizer, self._inner, step=optimizer_step)
        yield find_fragments(optimizer, self._inner, names=self._names)
        rebuild_weights(optimizer)
        if partitioned_weights:
            optimizer.checkpoint_event_epilogue()
        self._engine.global_steps = iterations
        self._engine.micro_steps = iterations * self._engine.gradient_accumulation_steps()
        self._engine.global_samples = iterations * self._engine.train_batch_size()

    def close(self) -> None:
        """Remove DeepSpeed's hooks."""
        self._engine.destroy()


def _masked_sum(losses: Tensor, micro: MicroBatch) -> Tensor:
    return (losses.detach().double() * micro.loss_mask).sum()


def _sum_gradients_in_fp32(model: nn.Module) -> None:
    """Let autograd add bf16 gradients into fp32 tensors; DeepSpeed's stage 0 would add in bf16."""
    for parameter in model.parameters():
        if not hasattr(parameter, "grad_dtype"):
            raise ValueError(
                f"bf16 without ZeRO needs fp32 sums of gradients, which torch {torch.__version__} "
                f"cannot keep; use parallel.zero_stage = 1."
            )
        parameter.grad_dtype = torch.float32


def _global_norm(gradients: Sequence[Tensor], *, group: ProcessGroup | None) -> float:
    """2-norm over this rank's gradients and those of the other tensor-parallel ranks.

    Summed in float64, as DeepSpeed sums: on a CPU torch's float32 norm of some millions of elements
    is 1e-4 to 1e-3 too small.
    """
    wide = torch.float64 if gradients[0].device.type != "mps" else torch.float32
    norms = torch.stack(torch._foreach_norm(list(gradients), 2, dtype=wide)).double()
    squares = norms.square().sum()
    if group is not None:
        dist.all_reduce(squares, group=group)
    return math.sqrt(squares.item()) if squares.isfinite() else float(squares.item())


def _initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    derived: dict[str, Any],
    groups: ProcessGroups,
) -> Any:
    _prepare_deepspeed(next(model.parameters()).device)
    # Also without tensor parallelism: DeepSpeed keeps the last unit for all engines of a process.
    unit = _ModelParallelUnit(groups)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=derived, mpu=unit, dist_init_required=False
    )
    return engine


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

    def get_data_parallel_group(self) -> ProcessGroup:
        return self._dp

    def get_data_parallel_rank(self) -> int:
        return self._dp.rank()

    def get_data_parallel_world_size(self) -> int:
        return self._dp.size()

    def get_model_parallel_group(self) -> ProcessGroup:
        return self._tp

    def get_model_parallel_rank(self) -> int:
        return self._groups.tp_rank

    def get_model_parallel_world_size(self) -> int:
        return self._groups.tp_size

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
