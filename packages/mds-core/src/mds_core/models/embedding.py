"""How a decoder or a T5 begins: the vectors of its tokens and positions.

Shapes: ``b`` micro batch, ``s`` sequence, ``h`` hidden, ``t`` tensor-parallel size, ``u`` ulysses
size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mds_core.layers.attention import Context
from mds_core.models.block import Build, drop

__all__ = ["Embedding"]


class Embedding(nn.Module):
    """Token vectors, perhaps normalised, plus, where they are learned, position vectors.

    Args:
        build: What every part of the model is built from.
        table_only: Only hold the table that a tied head on another stage uses.
    """

    def __init__(self, build: Build, *, table_only: bool) -> None:
        super().__init__()
        config = build.config
        self.probability = config.hidden_dropout
        self.word_embeddings = build.word_embeddings()
        self.layernorm = None
        if not table_only and config.embedding_norm:
            self.layernorm = build.norm()
        self.position_embeddings = None
        if not table_only and config.position_embedding == "learned":
            self.position_embeddings = build.position_embeddings(config.max_position_embeddings)

    def forward(
        self, tokens: Tensor, position_ids: Tensor, context: Context, *, layer: int = 0
    ) -> Tensor:
        """Look up this rank's part of the sequences.

        Args:
            tokens: [b, s / u] int64, this ulysses place's.
            position_ids: [b or 1, s] int64, of the whole sequences.
            context: Of the forward pass.
            layer: Number that keys the dropout: that of the layer behind it.

        Returns:
            [b, s / u, h], with sequence parallelism [b, s / u / t, h].
        """
        hidden: Tensor = self.word_embeddings(tokens)
        if self.layernorm is not None:
            hidden = self.layernorm(hidden)
        if self.position_embeddings is not None:
            own = [position_ids[:, rows.start : rows.stop] for rows in context.rows]
            hidden = hidden + self.position_embeddings(torch.cat(own, dim=1))
        return drop(hidden, context, layer=layer, site="embedding", probability=self.probability)
