"""The shape of a BERT: that of its layers, and its two heads."""

from __future__ import annotations

from dataclasses import dataclass

from mds_core.config import GPTConfig
from mds_core.config.counts import attention_matmul_params, norm_params

__all__ = ["BertConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BertConfig(GPTConfig):
    """Shape of an encoder with a masked-word head and, if wanted, a binary head.

    With ``residual_post_layernorm`` it is the published BERT, without it Megatron's pre-LN one.

    Raises:
        ValueError: As for `GPTConfig`, or a field has a value that a BERT does not have.
    """

    num_token_types: int = 2
    """Kinds of segments that a token can belong to."""
    binary_head: bool = True
    """Whether a second head says if two segments belong together."""

    def __post_init__(self) -> None:
        GPTConfig.__post_init__(self)
        for name, wanted in (
            ("position_embedding", "learned"),
            ("tie_embeddings", True),
            ("sliding_window", None),
            ("num_experts", None),
            ("layer_experts", None),
        ):
            if getattr(self, name) != wanted:
                raise ValueError(
                    f"{name} ({getattr(self, name)!r}) must be {wanted!r} for a BERT; leave it out."
                )

    def num_params(self) -> int:
        """Trained numbers of the whole model, over all ranks, with the true vocabulary."""
        token_types = self.num_token_types * self.hidden_size
        return GPTConfig.num_params(self) + token_types + self.num_head_params()

    def num_head_params(self) -> int:
        """Trained numbers of the two heads, without the table of token vectors."""
        dense = self.hidden_size * (self.hidden_size + 1)
        word_head = dense + norm_params(self) + self.vocab_size
        return word_head + (dense + 2 * (self.hidden_size + 1) if self.binary_head else 0)

    def flops_per_token(self, seq_length: int) -> float:
        """Floating-point operations of one training step per token, forward and backward.

        Counted are the matrix products only, as for `GPTConfig`, but every token attends to every
        other one, and the heads come on top.
        """
        attention = 2 * self.num_attention_heads * self.channels * seq_length
        layer = attention_matmul_params(self) + attention
        mlp = self.hidden_size * (self.fc1_width + self.ffn_width)
        words = self.hidden_size * (self.hidden_size + self.vocab_size)
        binary = self.hidden_size * (self.hidden_size + 2) if self.binary_head else 0
        return 6.0 * (self.num_layers * (layer + mlp) + words + binary / seq_length)
