"""Stages of a GPT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from mds_core.config import GPTConfig
from mds_core.groups import ProcessGroups
from mds_core.models.context import document_numbers
from mds_core.models.gpt import GPT
from mds_core.partition import Stage
from mds_core.pipeline.part import Inputs, Part, StageLoss, check_like
from mds_core.rng import DropoutKey

__all__ = ["GPTPart"]


class GPTPart(Part):
    """A stage of a GPT; what is handed on is the residual stream."""

    KIND = "GPT"
    OPTIONAL = ("loss_mask", "position_ids", "cumulative_lengths")
    model: GPT

    @classmethod
    def build(
        cls, config: GPTConfig, groups: ProcessGroups, *, splits: bool, **options: Any
    ) -> Self:
        """Make the model of the stage; ``options`` are those of `GPT`."""
        return cls(GPT(config, groups, **options), splits=splits)

    @property
    def held(self) -> GPT:
        """The stage's model."""
        return self.model

    @classmethod
    def shared(cls, config: GPTConfig, partition: Sequence[Stage]) -> Mapping[str, tuple[int, ...]]:
        """Parameters that stand on several stages."""
        if not config.tie_embeddings:
            return {}
        return {"embedding.word_embeddings.weight": (0, len(partition) - 1)}

    @classmethod
    def prepared(cls, tokens: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Number positions and documents."""
        bounds = batch.pop("cumulative_lengths", None)
        if "position_ids" not in batch:
            numbers = torch.arange(tokens.size(1), device=tokens.device)
            batch["position_ids"] = numbers.expand_as(tokens)
        if bounds is not None:
            batch["documents"] = document_numbers(bounds, tokens=tokens)
        check_like(tokens, batch)
        return batch

    def run(self, x: Tensor, batch: Inputs, key: DropoutKey | None) -> tuple[Tensor, Tensor | None]:
        """The residual stream, and what the routing of the stage's experts costs."""
        hidden, cost = self.model.forward_routed(
            x,
            position_ids=batch["position_ids"],
            dropout_key=key,
            documents=batch.get("documents"),
        )
        if cost is None or not self.model.training:
            return hidden, None
        return hidden, self.model.routing_sum(cost, batch["labels"], batch.get("loss_mask"))

    def loss(self, hidden: Tensor, batch: Inputs) -> StageLoss:
        """The loss of the tokens."""
        found = self.model.loss(hidden, batch["labels"], batch.get("loss_mask"))
        return StageLoss((found.loss_sum,), found.losses)

    def passed(self, layer: int, *, tokens: Tensor, batch: Inputs) -> int:
        """The tokens, before every layer."""
        del layer, batch
        return tokens.size(1)
