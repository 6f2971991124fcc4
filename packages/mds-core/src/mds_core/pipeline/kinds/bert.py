"""Stages of a BERT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import Tensor

from mds_core.bert_config import BertConfig
from mds_core.groups import ProcessGroups
from mds_core.models.bert import Bert
from mds_core.partition import Stage
from mds_core.pipeline.part import Inputs, Part, StageLoss, check_like
from mds_core.rng import DropoutKey

__all__ = ["BertPart"]


class BertPart(Part):
    """A stage of a BERT; both heads stand on the last one."""

    KIND = "BERT"
    OPTIONAL = ("loss_mask", "binary_labels", "token_types", "padding_mask")
    model: Bert

    @classmethod
    def build(
        cls, config: BertConfig, groups: ProcessGroups, *, splits: bool, **options: Any
    ) -> Self:
        """Make the model of the stage; ``options`` are those of `Bert`."""
        return cls(Bert(config, groups, **options), splits=splits)

    @property
    def held(self) -> Bert:
        """The stage's model."""
        return self.model

    @classmethod
    def shared(
        cls, config: BertConfig, partition: Sequence[Stage]
    ) -> Mapping[str, tuple[int, ...]]:
        """Parameters that stand on several stages."""
        del config
        return {"embedding.word_embeddings.weight": (0, len(partition) - 1)}

    @classmethod
    def prepared(cls, tokens: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Check the shapes."""
        check_like(tokens, batch)
        return batch

    def run(self, x: Tensor, batch: Inputs, key: DropoutKey | None) -> tuple[Tensor, None]:
        """The residual stream."""
        hidden = self.model.forward_stage(
            x,
            token_types=batch.get("token_types"),
            padding_mask=batch.get("padding_mask"),
            dropout_key=key,
        )
        return hidden, None

    def loss(self, hidden: Tensor, batch: Inputs) -> StageLoss:
        """The losses of the words, and of the binary head where it is judged."""
        found = self.model.loss(
            hidden,
            batch["labels"],
            batch.get("loss_mask"),
            binary_labels=batch.get("binary_labels"),
        )
        sums = (found.loss_sum, found.binary_sum)
        return StageLoss(tuple(each for each in sums if each is not None), found.losses)

    def terms(self, batch: Inputs) -> int:
        """Words, and samples where the binary head is judged."""
        return 2 if self.model.config.binary_head and "binary_labels" in batch else 1

    def passed(self, layer: int, *, tokens: Tensor, batch: Inputs) -> int:
        """The tokens, before every layer."""
        del layer, batch
        return tokens.size(1)
