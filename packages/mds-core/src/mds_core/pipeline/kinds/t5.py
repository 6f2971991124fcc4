"""Stages of a T5: first those of the encoder, then those of the decoder; one may hold both kinds.

Between stages of the decoder the encoder's output travels with the decoder's stream, one behind the
other in one tensor, so that every schedule hands on a single one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import Tensor

from mds_core.groups import ProcessGroups
from mds_core.models.t5 import T5
from mds_core.partition import Stage
from mds_core.pipeline.part import Inputs, Part, StageLoss, check_like
from mds_core.rng import DropoutKey
from mds_core.t5_config import T5Config

__all__ = ["T5Part"]

_OF_ENCODER = ("padding_mask",)


class T5Part(Part):
    """A stage of a T5."""

    KIND = "T5"
    REQUIRED = ("decoder_tokens",)
    OPTIONAL = ("loss_mask", "padding_mask")
    model: T5

    @classmethod
    def build(
        cls, config: T5Config, groups: ProcessGroups, *, splits: bool, **options: Any
    ) -> Self:
        """Make the model of the stage; ``options`` are those of `T5`."""
        return cls(T5(config, groups, **options), splits=splits)

    @property
    def held(self) -> T5:
        """The stage's model."""
        return self.model

    @classmethod
    def shared(cls, config: T5Config, partition: Sequence[Stage]) -> Mapping[str, tuple[int, ...]]:
        """The tables with which both stacks begin, and the output layer's."""
        begins = next(s.index for s in partition if config.num_layers in s.layers)
        embeds = tuple(sorted({0, begins}))
        shared = {
            "embedding.word_embeddings.weight": tuple(sorted({*embeds, len(partition) - 1})),
            "embedding.position_embeddings.weight": embeds,
        }
        if config.embedding_norm:
            shared["embedding.layernorm.weight"] = embeds
            if config.normalization == "layernorm":
                shared["embedding.layernorm.bias"] = embeds
        return {name: stages for name, stages in shared.items() if len(stages) > 1}

    @classmethod
    def prepared(cls, tokens: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Check the shapes: some belong to the encoder, the others to the decoder."""
        decoder_tokens = batch["decoder_tokens"]
        if len(decoder_tokens) != len(tokens):
            raise ValueError(
                f"tokens are of {len(tokens)} samples, decoder_tokens of {len(decoder_tokens)}; "
                f"they must agree."
            )
        own = {name: tensor for name, tensor in batch.items() if name in _OF_ENCODER}
        check_like(tokens, own)
        others = {name: tensor for name, tensor in batch.items() if name not in _OF_ENCODER}
        check_like(decoder_tokens, others, name="decoder_tokens")
        return batch

    def run(self, x: Tensor, batch: Inputs, key: DropoutKey | None) -> tuple[Tensor, None]:
        """What `T5.forward_stage` gives."""
        hidden = self.model.forward_stage(
            x,
            decoder_tokens=batch["decoder_tokens"],
            padding_mask=batch.get("padding_mask"),
            dropout_key=key,
        )
        return hidden, None

    def loss(self, hidden: Tensor, batch: Inputs) -> StageLoss:
        """The loss of the decoder's tokens."""
        found = self.model.loss(hidden, batch["labels"], batch.get("loss_mask"))
        return StageLoss((found.loss_sum,), found.losses)

    def passed(self, layer: int, *, tokens: Tensor, batch: Inputs) -> int:
        """The encoder's tokens, and behind the decoder's first layer its own too."""
        begun = layer > self.model.config.num_layers
        return tokens.size(1) + (batch["decoder_tokens"].size(1) if begun else 0)

    @classmethod
    def lengths(cls, tokens: Tensor, batch: Inputs) -> tuple[int, ...]:
        """Both lengths."""
        return tokens.size(1), batch["decoder_tokens"].size(1)
