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

__all__ = [
    "Distillation",
    "DistilledGPT",
    "DistilledLoss",
    "Lesson",
    "check_teachable",
    "divergence",
]


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
            ValueError: It has another vocabulary or padding of it, or ranks hold other positions.
        """
        check_teachable(self, teacher)
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
        divergence_sum, divergences = divergence(
            Lesson(self, hidden), Lesson(teacher, known), distillation, loss_mask=loss_mask
        )
        alpha, beta = distillation.alpha, distillation.beta
        return DistilledLoss(
            alpha * plain.loss_sum, alpha * plain.losses, beta * divergence_sum, beta * divergences
        )


class Lesson(NamedTuple):
    """What a model, or its last stage, makes of a micro batch."""

    model: GPT
    hidden: Tensor
    """[b, s, h] behind its last layer."""


def divergence(
    student: Lesson, teacher: Lesson, distillation: Distillation, *, loss_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compare predictions: the sum over the counted tokens and [b, s] of all, without `beta`.

    Every rank of a sequence gets the whole.

    Args:
        student: Whose hidden states get a gradient.
        teacher: Of the same vocabulary, padding and groups.
        distillation: Its temperature counts.
        loss_mask: [b, s] weight of each token; ones if None.
    """
    model, head = student.model, student.model._head()
    found = linear_divergence(
        Prediction(model._whole(student.hidden).flatten(0, 1), head.weight),
        Prediction(
            teacher.model._whole(teacher.hidden).flatten(0, 1), teacher.model._head().weight
        ),
        temperature=distillation.temperature,
        loss_weights=None if loss_mask is None else model.share.own(loss_mask).flatten(),
        vocab_start=head.start,
        vocab_size=model.config.vocab_size,
        group=model.groups.tp,
    )
    losses = model.share.joined(found.losses.view(len(student.hidden), -1))
    return reduce(found.loss_sum, group=model.groups.ulysses), losses


def check_teachable(student: GPT, teacher: GPT) -> None:
    """Raise ValueError if the predictions of two models, or of their stages, cannot be compared."""
    models = student, teacher
    rows = [each.config.padded_vocab_size(each.groups.tp_size) for each in models]
    sizes = [each.config.vocab_size for each in models]
    if sizes[0] != sizes[1] or rows[0] != rows[1]:
        raise ValueError(
            f"the teacher has {sizes[1]} words in {rows[1]} rows and the student {sizes[0]} in "
            f"{rows[0]}; they must be the same to be compared."
        )
    sharing = [(each.sequence_parallel, each.execution.sequence_sharing) for each in models]
    if sharing[0] != sharing[1] and student.sequence_shares * teacher.sequence_shares > 1:
        raise ValueError(
            f"the teacher's ranks share a sequence by sequence_parallel {sharing[1][0]} and "
            f"{sharing[1][1]}, the student's by {sharing[0][0]} and {sharing[0][1]}; each rank "
            f"must hold the same positions of both."
        )
