"""How a BERT begins: the vectors of its tokens, their positions and their segments.

Shapes: ``b`` micro batch, ``s`` sequence, ``h`` hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mds_core.layers.attention import Context
from mds_core.models.block import Build, drop

__all__ = ["BertEmbedding"]


class BertEmbedding(nn.Module):
    """The sum of token, position and token type vectors.

    Args:
        build: What every part of the model is built from.
        num_token_types: Kinds of segments.
        table_only: Only hold the table that the words' head on another stage uses.
    """

    def __init__(self, build: Build, *, num_token_types: int, table_only: bool) -> None:
        super().__init__()
        config = build.config
        self.probability = config.hidden_dropout
        self.word_embeddings = build.word_embeddings()
        self.position_embeddings = self.tokentype_embeddings = self.layernorm = None
        if table_only:
            return
        self.position_embeddings, self.tokentype_embeddings = (
            build.position_embeddings(count)
            for count in (config.max_position_embeddings, num_token_types)
        )
        self.layernorm = build.norm() if config.embedding_norm else None

    def forward(self, tokens: Tensor, token_types: Tensor, context: Context) -> Tensor:
        """Map tokens and their types, each [b, s], to this rank's positions [b, s, h]."""
        assert self.position_embeddings is not None, "only the first stage embeds"
        assert self.tokentype_embeddings is not None, "only the first stage embeds"
        words: Tensor = self.word_embeddings(tokens)
        if self.layernorm is not None:
            words = self.layernorm(words)
        (rows,) = context.rows
        positions = torch.arange(rows.start, rows.stop, device=tokens.device)[None]
        hidden = words + self.position_embeddings(positions)
        hidden = hidden + self.tokentype_embeddings(token_types[:, rows.start : rows.stop])
        return drop(hidden, context, layer=0, site="embedding", probability=self.probability)
