"""A stage as torch's schedules call it: one positional input, one output tensor.

Each kind of model says what its stages get beside their input, what they hand on, and which
parameters stand on several of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from mds_core.config import GPTConfig
from mds_core.groups import ProcessGroups
from mds_core.layers.side_loss import with_loss
from mds_core.partition import Stage
from mds_core.pipeline.deferred import WeightGradients
from mds_core.rng import DropoutKey
from mds_core.sharding import ParameterShard

__all__ = ["Inputs", "Part", "StageLoss", "StageModel", "check_like", "given"]

Inputs = Mapping[str, Tensor]
"""What every stage gets of a micro batch beside its input."""


class StageModel(Protocol):
    """What is needed of a model, or of one stage of it."""

    @property
    def stage(self) -> Stage:
        """Which part of the model it is."""

    @property
    def config(self) -> GPTConfig:
        """Shape of the whole model."""

    @property
    def seed(self) -> int:
        """Of the dropout masks."""

    @property
    def sequence_shares(self) -> int:
        """Ranks over which the positions of the residual stream are split."""

    def parameter_shards(self) -> dict[str, ParameterShard]:
        """What this rank holds of each parameter, by canonical name."""


class StageLoss(NamedTuple):
    """What the last stage computes of one micro batch."""

    sums: tuple[Tensor, ...]
    """Scalars, the sum of each term of the loss, differentiable."""
    losses: Tensor
    """[b, s] losses of the tokens, detached."""
    divergences: Tensor | None = None
    """[b, s] of the tokens from a teacher's predictions, detached."""


class Part(nn.Module):
    """One stage; each kind of model has its subclass.

    Args:
        model: The stage.
        splits: Whether weight gradients are computed apart from the input's.
    """

    KIND: ClassVar[str]
    """Name of the kind of model, for messages."""
    OPTIONAL: ClassVar[tuple[str, ...]]
    """Inputs that a micro batch may have besides tokens and labels."""
    REQUIRED: ClassVar[tuple[str, ...]] = ()
    """Those that it must have."""

    def __init__(self, model: nn.Module, *, splits: bool) -> None:
        super().__init__()
        self.model = model
        self.gradients: WeightGradients | None = None
        if splits:
            self.gradients = WeightGradients()
            self.gradients.attach(model)
        self.begin((1.0,))

    @property
    @abstractmethod
    def held(self) -> StageModel:
        """The stage's model."""

    @property
    def stage(self) -> Stage:
        """Which stage it is."""
        return self.held.stage

    def begin(self, scales: Sequence[float | Tensor]) -> None:
        """Forget the losses of the step before; ``scales`` are factors of the loss's terms."""
        self.scales = tuple(scales)
        self.sums: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.divergences: list[Tensor] = []

    def forward(self, x: Tensor, *, samples: Tensor | None = None, **batch: Tensor) -> Tensor:
        """Map what the stage before gives to what the next one gets, or to the scaled loss."""
        key = None if samples is None else DropoutKey(seed=self.held.seed, samples=samples)
        hidden, cost = self.run(x, batch, key)
        if self.stage.last:
            return self._finish(hidden, batch, cost)
        if cost is None:
            return hidden
        self.sums.append(torch.stack([cost.detach(), *cost.new_zeros(len(self.scales) - 1)]))
        # The next stage sends a gradient for the hidden states only.
        return with_loss(hidden, cost * self.scales[0])

    def _finish(self, hidden: Tensor, batch: Inputs, cost: Tensor | None) -> Tensor:
        found = self.loss(hidden, batch)
        sums = found.sums if cost is None else (found.sums[0] + cost, *found.sums[1:])
        self.sums.append(torch.stack([each.detach() for each in sums]))
        self.losses.append(found.losses)
        if found.divergences is not None:
            self.divergences.append(found.divergences)
        scaled = [each * scale for each, scale in zip(sums, self.scales, strict=True)]
        return torch.stack(scaled).sum()

    @abstractmethod
    def run(self, x: Tensor, batch: Inputs, key: DropoutKey | None) -> tuple[Tensor, Tensor | None]:
        """What leaves the stage's layers, and what they add to the loss by themselves, or None."""

    @abstractmethod
    def loss(self, hidden: Tensor, batch: Inputs) -> StageLoss:
        """The terms of the loss, on the last stage."""

    @classmethod
    @abstractmethod
    def build(cls, config: Any, groups: ProcessGroups, *, splits: bool, **options: Any) -> Self:
        """Make the model of the stage and what runs it; ``options`` are the model's."""

    @classmethod
    @abstractmethod
    def shared(cls, config: Any, partition: Sequence[Stage]) -> Mapping[str, tuple[int, ...]]:
        """Canonical names of parameters that stand on several stages, and which these are."""

    @classmethod
    @abstractmethod
    def prepared(cls, tokens: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Complete and check what every stage gets of a batch beside its input."""

    def terms(self, batch: Inputs) -> int:
        """Number of terms of the loss."""
        del batch
        return 1

    @abstractmethod
    def passed(self, layer: int, *, tokens: Tensor, batch: Inputs) -> int:
        """Positions that are handed on before ``layer``, over all ranks that share a sequence."""

    @classmethod
    def lengths(cls, tokens: Tensor, batch: Inputs) -> tuple[int, ...]:
        """What the sizes of all stages' buffers follow from, beside the number of samples."""
        del batch
        return (tokens.size(1),)


def given(part: type[Part], inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The inputs that are not None, if the kind of model knows all of them.

    Raises:
        ValueError: One is unknown or missing.
    """
    known = (*part.REQUIRED, *part.OPTIONAL)
    if unknown := [name for name in inputs if name not in known]:
        raise ValueError(
            f"a {part.KIND} takes no {', '.join(unknown)}; beside tokens and labels it takes "
            f"{', '.join(known)}."
        )
    found = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    if missing := [name for name in part.REQUIRED if name not in found]:
        raise ValueError(f"a {part.KIND} needs {', '.join(missing)} beside tokens and labels.")
    return found


def check_like(tokens: Tensor, batch: Inputs, *, name: str = "tokens") -> None:
    """Raise ValueError unless every tensor has the rows and positions of ``tokens``."""
    for other, tensor in batch.items():
        if tensor.shape[:2] != tokens.shape[: tensor.dim()]:
            raise ValueError(
                f"{other} has the shape {tuple(tensor.shape)}, {name} {tuple(tokens.shape)}; they "
                f"must agree."
            )
