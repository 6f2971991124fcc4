"""Stages of a GPT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from mds_core.config import GPTConfig
from mds_core.groups import ProcessGroups
from mds_core.models.context import document_numbers
from mds_core.models.distilled import Lesson, divergence
from mds_core.models.gpt import GPT
from mds_core.partition import Stage
from mds_core.pipeline.lessons import Lessons
from mds_core.pipeline.part import Inputs, Part, StageLoss, check_like
from mds_core.rng import DropoutKey

__all__ = ["GPTPart"]


class GPTPart(Part):
    """A stage of a GPT; what is handed on is the residual stream."""

    KIND = "GPT"
    OPTIONAL = ("loss_mask", "position_ids", "cumulative_lengths")
    model: GPT
    lessons: Lessons | None = None
    """What is known of a teacher; None without one."""

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
        cost = self.model.routing_sum(cost, batch["labels"], batch.get("loss_mask"))
        if self.lessons is not None and self.lessons.asked:
            cost = self.lessons.distillation.alpha * cost
        return hidden, cost

    def loss(self, hidden: Tensor, batch: Inputs) -> StageLoss:
        """The loss of the tokens."""
        mask = batch.get("loss_mask")
        found = self.model.loss(hidden, batch["labels"], mask)
        if self.lessons is None:
            return StageLoss((found.loss_sum,), found.losses)
        distillation, teacher = self.lessons.distillation, self.lessons.teacher
        if not self.lessons.asked or teacher is None:
            return StageLoss((found.loss_sum, torch.zeros_like(found.loss_sum)), found.losses)
        divergence_sum, divergences = divergence(
            Lesson(self.model, hidden),
            Lesson(teacher, self.lessons.known[len(self.losses)]),
            distillation,
            loss_mask=mask,
        )
        alpha, beta = distillation.alpha, distillation.beta
        sums = (alpha * found.loss_sum, beta * divergence_sum)
        return StageLoss(sums, alpha * found.losses, beta * divergences)

    def terms(self, batch: Inputs) -> int:
        """The text's and, of a student, the teacher's."""
        del batch
        return 1 if self.lessons is None else 2

    def passed(self, layer: int, *, tokens: Tensor, batch: Inputs) -> int:
        """The tokens, before every layer."""
        del layer, batch
        return tokens.size(1)
