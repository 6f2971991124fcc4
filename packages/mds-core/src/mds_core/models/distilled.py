"""A GPT that learns from the text and from a teacher: knowledge distillation.

In training its loss has two parts, ``alpha`` times the cross-entropy and ``beta`` times the
divergence from the teacher's probabilities; in evaluation it is the plain one.

Shapes: ``b`` micro batch, ``s`` sequence, ``h`` hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mds_core.collectives import reduce
from mds_core.config.distillation import Distillation
from mds_core.layers.cache import KVCache, SlotRows
from mds_core.layers.divergence import Prediction, linear_divergence
from mds_core.models.context import numbered
from mds_core.models.gpt import GPT
from mds_core.models.losses import GPTLoss
from mds_core.rng import DropoutKey

__all__ = ["Distillation", "DistilledGPT", "DistilledLoss"]


class DistilledLoss(NamedTuple):
    """What a forward pass with labels gives in training. Both parts have their weights."""

    loss_sum: Tensor
    """Scalar, the masked sum of the tokens' cross-entropies, differentiable."""
    losses: Tensor
    """[b, s] cross-entropies, not masked, detached."""
    divergence_sum: Tensor
    """Scalar, the masked sum of the divergences, differentiable."""
    divergences: Tensor
    """[b, s], not masked, detached."""


class DistilledGPT(GPT):
    """A GPT beside a teacher, whose parameters are none of its own.

    It has the parameters, names and start values of a `GPT`. The teacher must have the same
    vocabulary, padding and groups; its other sizes are its own.

    Args:
        *arguments: As for `GPT`.
        **options: As for `GPT`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._teacher: tuple[GPT, Distillation] | None = None
        self.teaching = True
        """Whether the teacher is asked; without it the loss is the plain one."""

    def set_teacher(self, teacher: GPT, distillation: Distillation) -> None:
        """Learn from this teacher from now on.

        Raises:
            ValueError: It has another vocabulary, or another padding of it.
        """
        rows = [each.config.padded_vocab_size(each.groups.tp_size) for each in (self, teacher)]
        sizes = [self.config.vocab_size, teacher.config.vocab_size]
        if sizes[0] != sizes[1] or rows[0] != rows[1]:
            raise ValueError(
                f"the teacher has {sizes[1]} words in {rows[1]} rows and the student {sizes[0]} in "
                f"{rows[0]}; they must be the same to be compared."
            )
        teacher.requires_grad_(requires_grad=False)
        # In a tuple: as a submodule it would be trained, saved and counted.
        self._teacher = (teacher.eval(), distillation)

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        loss_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
        cumulative_lengths: Tensor | None = None,
        cache: KVCache | SlotRows | None = None,
    ) -> Tensor | GPTLoss | DistilledLoss:
        """As `GPT.forward`; with labels, in training, the parts of the loss apart."""
        if labels is None or not self.training or not self.teaching or self._teacher is None:
            return super().forward(
                tokens,
                labels,
                loss_mask=loss_mask,
                position_ids=position_ids,
                dropout_key=dropout_key,
                cumulative_lengths=cumulative_lengths,
                cache=cache,
            )
        position_ids, documents = numbered(tokens, position_ids, cumulative_lengths)
        hidden, cost = self.forward_routed(
            tokens, position_ids=position_ids, dropout_key=dropout_key, documents=documents
        )
        teacher, distillation = self._teacher
        with torch.no_grad():
            known = teacher.forward_stage(tokens, position_ids=position_ids, documents=documents)
        plain = self.loss(hidden, labels, loss_mask, routing_cost=cost)
        divergence_sum, divergences = self._divergence(hidden, known, loss_mask)
        alpha, beta = distillation.alpha, distillation.beta
        return DistilledLoss(
            alpha * plain.loss_sum, alpha * plain.losses, beta * divergence_sum, beta * divergences
        )

    def _divergence(
        self, hidden: Tensor, known: Tensor, loss_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Sum over the counted tokens, and [b, s] of all, on every rank of a sequence."""
        assert self._teacher is not None
        teacher, distillation = self._teacher
        head = self._head()
        found = linear_divergence(
            Prediction(self._whole(hidden).flatten(0, 1), head.weight),
            Prediction(teacher._whole(known).flatten(0, 1), teacher._head().weight),
            temperature=distillation.temperature,
            loss_weights=None if loss_mask is None else self.share.own(loss_mask).flatten(),
            vocab_start=head.start,
            vocab_size=self.config.vocab_size,
            group=self.groups.tp,
        )
        losses = self.share.joined(found.losses.view(len(hidden), -1))
        return reduce(found.loss_sum, group=self.groups.ulysses), losses
