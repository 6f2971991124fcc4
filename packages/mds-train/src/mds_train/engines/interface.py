"""What the loop and the checkpoints need of an engine, whatever library is behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from mds_train.batches import ModelInput

__all__ = ["BrokenGradient", "Engine", "Fragment", "OptimizerState", "Update"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenGradient:
    """One rank's part of one parameter's summed gradient, with elements that are not finite."""

    name: str
    """Canonical name of the parameter."""

    count: int
    numel: int
    """Elements that this rank has of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What became of one step's gradients."""

    grad_norm: float
    """Global norm before clipping, each parameter counted once; the same on all ranks."""

    applied: bool
    """False if the gradients were not finite; then nothing changed on any rank."""

    loss_scale: float = 1.0
    """What the loss was multiplied by; other than 1 with fp16 only."""

    searching: bool = False
    """The gradients were not finite, and the loss scale is still looking for its place."""

    exhausted: bool = False
    """The gradients were not finite at the smallest loss scale."""

    broken: tuple[BrokenGradient, ...] = ()
    """If the update was not applied: what this rank has of the gradients that were not finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragment:
    """The elements of one parameter that this rank's optimizer steps.

    They are the range [start, start + numel) of the flattened local (tensor-parallel) tensor. The
    tensors are views of length ``numel``: writing to them writes to the optimizer.
    """

    name: str
    """Canonical name of the parameter."""

    start: int
    numel: int
    weight: Tensor
    """What the model computes with."""

    master: Tensor
    """What the optimizer steps, fp32; in fp32 runs it may share memory with `weight`."""

    moments: dict[str, Tensor]
    """What the optimizer keeps (adamw: exp_avg, exp_avg_sq), fp32; empty before its first step."""

    replicated: bool
    """Every data-parallel rank holds this same fragment."""

    expert: bool = False
    """It is an expert's, and data-parallel ranks that share out the experts hold other ones."""

    copy: bool = False
    """Another pipeline stage owns the parameter; this one follows it and is not saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerState:
    """What an optimizer knows besides tensors."""

    name: str
    step: int
    """Its own count of updates; differs from the number of steps when some were skipped."""

    groups: list[dict[str, Any]]
    """Hyperparameters and the canonical names of each group's parameters."""

    loss_scaler: dict[str, Any] | None = None
    """State of the loss scale with fp16."""


class Engine(Protocol):
    """Runs the model forward and backward and updates it. Calls are collective over all ranks."""

    @property
    def module(self) -> nn.Module:
        """The model itself."""

    def accumulate(self, batch: Sequence[ModelInput], *, weights: Sequence[float]) -> Tensor:
        """Run forward and backward over a step's micro batches and sum gradients over the ranks.

        Args:
            batch: This rank's micro batches, on the model's device.
            weights: Factor of each term of the loss in the backward pass.

        Returns:
            [k] float64: the sum of each term over this rank's samples. It is the same on the ranks
            that share the samples.
        """

    def step(self, *, lr: float, weight_decay: float) -> Update:
        """Clip, update, and forget the gradients; skip on all ranks if they are not finite."""

    def evaluating(self) -> AbstractContextManager[None]:
        """While open, the model is in evaluation mode and keeps no gradients."""

    def losses(self, batch: Sequence[ModelInput]) -> Tensor:
        """What `accumulate` returns, by forward passes only; called while `evaluating`."""

    def fragments(self) -> Sequence[Fragment]:
        """This rank's parts of all parameters, right after a step."""

    def optimizer_state(self) -> OptimizerState:
        """The optimizer's count of updates and hyperparameters."""

    def restoring(
        self,
        *,
        optimizer_step: int,
        iterations: int,
        loss_scaler: Mapping[str, Any] | None = None,
    ) -> AbstractContextManager[Sequence[Fragment]]:
        """Give fragments to fill with masters and moments; on leaving, weights follow the masters.

        Args:
            optimizer_step: The optimizer's own count; with 0 there are no moments to fill.
            iterations: Steps done, skipped ones included.
            loss_scaler: State of the loss scale; None begins anew.
        """

    def close(self) -> None:
        """Let go of hooks and groups."""
