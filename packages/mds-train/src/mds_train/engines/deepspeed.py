"""The engine on DeepSpeed 0.19, ZeRO 0 to 3, for a model without pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mds_core.groups import ProcessGroups
from mds_core.rng import DropoutKey
from mds_core.sharding import ParameterShard
from mds_train.batches import ModelInput
from mds_train.config import TrainConfig
from mds_train.engines.cpu_adam import cpu_adam_or_torch
from mds_train.engines.deepspeed_config import deepspeed_config
from mds_train.engines.deepspeed_start import initialize
from mds_train.engines.deepspeed_state import (
    create_moments,
    find_fragments,
    forget_phantom_step,
    names_of_stepped,
    pass_on_hyperparameters,
    rebuild_weights,
    set_loss_scale,
    stepping_optimizers,
    whole_gradients,
)
from mds_train.engines.interface import Fragment, OptimizerState, Update
from mds_train.engines.loss_scale import LossScale
from mds_train.engines.matrices import MatrixExchange, SteppedTensor
from mds_train.engines.overflow import OverflowWatch
from mds_train.engines.own_json import with_own_json
from mds_train.exchange import sum_over
from mds_train.optimizers.building import build_optimizer, group_names, set_hyperparameters
from mds_train.optimizers.muon import Muon

__all__ = ["DeepSpeedEngine", "sum_gradients_in_fp32"]

_TOGETHER = 1024
"""So many squares float32 sums to 1e-7 of them."""


class DeepSpeedEngine:
    """Forward, backward and update of one model by DeepSpeed.

    Args:
        model: The model on its device, in the dtype of the precision.
        config: The run.
        groups: This rank's process groups.
        split_names: Canonical names of the parameters that tensor-parallel ranks hold parts of.
        shapes: Global shape of every parameter of the whole model.
        shards: This rank's part of every parameter; for Muon only, which needs whole matrices.
        experts: Names of this rank's experts' parameters, where ranks share out the experts.
        parameters: By canonical name, where they are not those of the model's modules.
        copies: Names of those that ranks of another pipeline stage own, count and save.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        config: TrainConfig,
        groups: ProcessGroups,
        split_names: frozenset[str],
        shapes: Mapping[str, tuple[int, ...]],
        shards: Mapping[str, ParameterShard] | None = None,
        experts: frozenset[str] = frozenset(),
        parameters: Mapping[str, nn.Parameter] | None = None,
        copies: frozenset[str] = frozenset(),
    ) -> None:
        self._groups = groups
        self._seed = config.train.seed
        self._clipping = config.train.gradient_clipping
        self._stage = config.parallel.zero_stage
        own = dict(model.named_parameters()) if parameters is None else dict(parameters)
        own = {name: parameter for name, parameter in own.items() if parameter.requires_grad}
        self._names = {id(parameter): name for name, parameter in own.items()}
        self._copies, self._experts = copies, experts
        self._updates = 0
        self._optimizer_name = config.optimizer.name
        _mark_for_the_norm(own, split_names=split_names, copies=copies)
        optimizer = build_optimizer(own.items(), config=config.optimizer, experts=experts)
        if config.optimizer.implementation == "deepspeed-cpu":
            _check_in_host_memory(model, config)
            optimizer = cpu_adam_or_torch(optimizer, config=config.optimizer)
        self._engine = self._started(model, optimizer, config=config)
        self._group_names = group_names(shapes, muon=isinstance(optimizer, Muon))
        if isinstance(optimizer, Muon):
            dtype = torch.float32 if config.train.precision == "fp32" else torch.bfloat16
            optimizer.use(MatrixExchange(self._stepped, shards or {}, groups=groups, dtype=dtype))
        forget_phantom_step(self._engine.optimizer, self._inner)
        if self._stage == 0 and config.train.precision != "fp32":
            sum_gradients_in_fp32(own.values())
        self._overflows = OverflowWatch(self._engine.optimizer, names=self._names)
        self._fp16 = config.fp16 if config.train.precision == "fp16" else None
        self._scale = LossScale(scale=1.0) if self._fp16 is None else LossScale.first(self._fp16)
        self._use_scale()

    def _started(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, config: TrainConfig
    ) -> Any:
        """DeepSpeed's engine, by settings that follow from the run."""
        groups = self._groups
        on_cpu = next(model.parameters()).device.type == "cpu"
        replicas = groups.dp_size * groups.ulysses_size
        derived = deepspeed_config(config, dp_size=groups.dp_size, replicas=replicas, on_cpu=on_cpu)
        engine = initialize(
            model,
            optimizer,
            derived=with_own_json(derived, config=config),
            groups=groups,
            has_experts=bool(self._experts),
        )
        if self._stage == 0 and groups.dp_ulysses is None:
            # A sum over one replica, which would copy every gradient twice.
            engine.enable_backward_allreduce = False
        return engine

    @property
    def _inner(self) -> torch.optim.Optimizer:
        return self._engine.basic_optimizer  # type: ignore[no-any-return]

    @property
    def module(self) -> nn.Module:
        """The model itself."""
        return self._engine.module  # type: ignore[no-any-return]

    def accumulate(self, batch: Sequence[ModelInput], *, weights: Sequence[float]) -> Tensor:
        """Run forward and backward over the micro batches; see `Engine.accumulate`."""
        self._expect(len(batch))
        sums = []
        for index, micro in enumerate(batch):
            key = DropoutKey(seed=self._seed, samples=micro.samples)
            output = self._call(micro, dropout_key=key)
            terms = zip(micro.terms(output), weights, strict=True)
            loss = torch.stack([term * weight for term, weight in terms]).sum()
            self.backward(loss, last=index == len(batch) - 1)
            sums.append(micro.sums(output))
        return torch.stack(sums).sum(0)

    def _use_scale(self) -> None:
        if self._fp16 is not None:
            set_loss_scale(self._engine.optimizer, self._scale.scale)

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

    def losses(self, batch: Sequence[ModelInput]) -> Tensor:
        """Run the micro batches forward only; see `Engine.losses`."""
        return torch.stack(
            [micro.sums(self._call(micro, dropout_key=None)) for micro in batch]
        ).sum(0)

    def _call(self, micro: ModelInput, *, dropout_key: DropoutKey | None) -> Any:
        return self.forward(**micro.arguments(), dropout_key=dropout_key)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model through DeepSpeed's hooks."""
        return self._engine(*args, **kwargs)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add one micro batch's gradients; after the last one they are summed over the ranks."""
        if self._stage == 0:
            # DeepSpeed's class for half precision without ZeRO divides by the scale but leaves
            # the multiplication to a backward pass of its own, which the engine does not call.
            loss = loss * self._scale.scale
        # The loss carries its weight already, so DeepSpeed must not divide by the micro batches.
        self._engine.backward(loss, scale_wrt_gas=False)
        if not last:
            self._engine.step()  # only counts: the boundary is at the last micro batch

    def step(self, *, lr: float, weight_decay: float) -> Update:
        """Clip by the global norm and update; see `Engine.step`."""
        set_hyperparameters(self._inner, lr=lr, weight_decay=weight_decay)
        pass_on_hyperparameters(self._engine.optimizer, self._inner)
        gradients = whole_gradients(self._engine.optimizer)
        norm = None if gradients is None else self._clip(gradients)
        if norm is not None and not math.isfinite(norm):
            self._overflows.look()
        if self._stage == 0 and norm is not None and not math.isfinite(norm):
            self._skip()
            return self._update(norm, applied=False)
        self._engine.step()
        if norm is None:
            norm = float(self._engine.get_global_grad_norm())
        return self._update(norm, applied=bool(self._engine.was_step_applied()))

    def _update(self, norm: float, *, applied: bool) -> Update:
        """What became of the step; the loss scale moves on."""
        scale, config = self._scale, self._fp16
        self._updates += int(applied)
        if config is None:
            return Update(grad_norm=norm, applied=applied, broken=self._overflows.taken())
        self._scale = scale.after_step(overflow=not applied, config=config)
        self._use_scale()
        looked_for = config.loss_scale is None and not applied
        return Update(
            grad_norm=norm,
            applied=applied,
            loss_scale=scale.scale,
            searching=looked_for and not scale.at_floor(config),
            exhausted=looked_for and scale.at_floor(config),
            broken=self._overflows.taken(),
        )

    def _clip(self, gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> float:
        """Where this rank has all gradients of its part of the model, whole and summed."""
        counted = [pair for pair in gradients if self._counts(pair[0])]
        device = gradients[0][1].device
        shared = [each for parameter, each in counted if not self._is_expert(parameter)]
        squares = _squares(shared, device=device)
        if self._experts:
            experts = [each for parameter, each in counted if self._is_expert(parameter)]
            squares += sum_over(_squares(experts, device=device), group=self._groups.ep)
        norm = _root(sum_over(squares, group=self._groups.model)) / self._scale.scale
        if self._clipping and math.isfinite(norm) and norm > self._clipping:
            torch._foreach_mul_([each for _, each in gradients], self._clipping / (norm + 1e-6))
        return norm

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank is the one of its copies' ranks that counts it into the norm."""
        split: bool = parameter.tensor_model_parallel  # type: ignore[attr-defined]
        return self._names[id(parameter)] not in self._copies and (
            split or self._groups.tp_rank == 0
        )

    def _is_expert(self, parameter: nn.Parameter) -> bool:
        return self._names[id(parameter)] in self._experts

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
        return self._find_fragments()

    def _find_fragments(self) -> list[Fragment]:
        found = find_fragments(self._engine.optimizer, self._inner, names=self._names)
        return [
            replace(each, copy=each.name in self._copies, expert=each.name in self._experts)
            for each in found
        ]

    def _stepped(self) -> list[SteppedTensor]:
        """What the optimizer steps, and what this rank has in it."""
        fragments = {each.name: each for each in self._find_fragments()}
        return [
            SteppedTensor(
                tensor=tensor,
                names=names,
                fragments=tuple(fragments[name] for name in names if name in fragments),
            )
            for tensor, names in names_of_stepped(self._engine.optimizer, names=self._names)
        ]

    def optimizer_state(self) -> OptimizerState:
        """Count of updates and hyperparameters."""
        optimizers = stepping_optimizers(self._engine.optimizer, self._inner)
        states = [state for each in optimizers for state in each.state.values()]
        counts = {int(state["step"]) for state in states if "step" in state}
        if counts - {self._updates}:
            raise RuntimeError(
                f"The optimizer counts {sorted(counts)} steps after {self._updates} updates. This "
                f"is a fault of mds-train; please report it."
            )
        keys = ("lr", "weight_decay", "betas", "eps", "momentum")
        groups = [
            {key: group[key] for key in keys if key in group}
            | {"name": group["kind"], "parameters": self._group_names[group["kind"]]}
            for group in self._inner.param_groups
            if not group["expert"]
        ]
        scaler = None if self._fp16 is None else self._scale.record()
        return OptimizerState(
            name=self._optimizer_name, step=self._updates, groups=groups, loss_scaler=scaler
        )

    @contextmanager
    def restoring(
        self,
        *,
        optimizer_step: int,
        iterations: int,
        loss_scaler: Mapping[str, Any] | None = None,
    ) -> Iterator[Sequence[Fragment]]:
        """Give fragments to fill; see `Engine.restoring`."""
        optimizer = self._engine.optimizer
        partitioned_weights = hasattr(optimizer, "checkpoint_event_prologue") and self._stage == 3
        if partitioned_weights:
            optimizer.checkpoint_event_prologue()
        self._updates = optimizer_step
        if self._fp16 is not None and loss_scaler is not None:
            self._scale = LossScale.from_record(loss_scaler)
            self._use_scale()
        create_moments(optimizer, self._inner, step=optimizer_step)
        yield self._find_fragments()
        rebuild_weights(optimizer)
        if partitioned_weights:
            optimizer.checkpoint_event_epilogue()
        self._engine.global_steps = iterations
        self._engine.micro_steps = iterations * self._engine.gradient_accumulation_steps()
        self._engine.global_samples = iterations * self._engine.train_batch_size()

    def close(self) -> None:
        """Remove DeepSpeed's hooks."""
        self._engine.destroy()


def _mark_for_the_norm(
    parameters: Mapping[str, nn.Parameter], *, split_names: frozenset[str], copies: frozenset[str]
) -> None:
    """Set the marks that DeepSpeed reads where it counts a parameter into the gradient norm."""
    for name, parameter in parameters.items():
        parameter.tensor_model_parallel = name in split_names  # type: ignore[attr-defined]
        parameter.ds_pipe_replicated = name in copies  # type: ignore[attr-defined]


def sum_gradients_in_fp32(parameters: Iterable[nn.Parameter]) -> None:
    """Let autograd add bf16 gradients into fp32 tensors, where DeepSpeed would not do it.

    Raises:
        ValueError: If this torch cannot.
    """
    for parameter in parameters:
        if not hasattr(parameter, "grad_dtype"):
            raise ValueError(
                f"Half precision without ZeRO or with a pipeline needs fp32 sums, which torch "
                f"{torch.__version__} cannot keep; use torch 2.13, or parallel.zero_stage = 1 with "
                f"parallel.pp_size = 1."
            )
        parameter.grad_dtype = torch.float32


def _check_in_host_memory(model: nn.Module, config: TrainConfig) -> None:
    device = next(model.parameters()).device.type
    if device != "cpu" and config.memory.offload_optimizer == "none":
        raise ValueError(
            f'optimizer.implementation is "deepspeed-cpu", but the optimizer\'s state is on '
            f'{device}; set memory.offload_optimizer = "cpu", or use "torch".'
        )


def _squares(gradients: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """Sum of the squares of all elements, float64.

    Summed wide, as DeepSpeed sums: on a CPU torch's float32 norm of some millions of elements is
    1e-4 to 1e-3 too small.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    large = [each for each in gradients if device.type == "cpu" and each.numel() > _TOGETHER]
    small = [each for each in gradients if device.type != "cpu" or each.numel() <= _TOGETHER]
    if small:
        wide = torch.float64 if device.type != "mps" else torch.float32
        total += torch.stack(torch._foreach_norm(small, 2, dtype=wide)).double().square().sum()
    return total + torch.stack([_square(each) for each in large]).sum() if large else total


def _square(gradient: Tensor) -> Tensor:
    """The same of one gradient on a CPU, where torch would make a wide copy: rows, then wide."""
    flat = gradient.reshape(-1)
    rows, narrow = flat.numel() // _TOGETHER, torch.promote_types(flat.dtype, torch.float32)
    even = flat[: rows * _TOGETHER].view(rows, _TOGETHER)
    squares: Tensor = torch.linalg.vector_norm(even, dim=1, dtype=narrow).double().square().sum()
    rest: Tensor = torch.linalg.vector_norm(flat[rows * _TOGETHER :], dtype=torch.float64)
    return squares + rest.square()


def _root(squares: Tensor) -> float:
    return math.sqrt(squares.item()) if squares.isfinite() else float(squares.item())
