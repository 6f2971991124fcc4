"""The shape of a T5 as Megatron builds it: an encoder, and a decoder that attends to it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mds_core.config import GPTConfig
from mds_core.config.counts import attention_matmul_params, norm_params

__all__ = ["T5Config"]


@dataclass(frozen=True, kw_only=True, slots=True)
class T5Config(GPTConfig):
    """Shape of an encoder of ``num_layers`` layers and a decoder over one vocabulary.

    Megatron's T5 differs from the published one: learned positions, biases, LayerNorm, scaled
    attention, and a bias on the scores of the tied output layer.

    Raises:
        ValueError: As for `GPTConfig`, or a field has a value that this model does not have.
    """

    decoder_num_layers: int | None = None
    """Layers of the decoder; as many as the encoder has when left out."""

    def __post_init__(self) -> None:
        GPTConfig.__post_init__(self)
        for name, wanted in (
            ("position_embedding", "learned"),
            ("tie_embeddings", True),
            ("sliding_window", None),
            ("parallel_residual", False),
            ("num_experts", None),
            ("layer_experts", None),
        ):
            if getattr(self, name) != wanted:
                raise ValueError(
                    f"{name} ({getattr(self, name)!r}) must be {wanted!r} for a T5; leave it out."
                )

    @property
    def decoder_layers(self) -> int:
        """Layers of the decoder."""
        return self.decoder_num_layers or self.num_layers

    @property
    def stacked_layers(self) -> int:
        """All layers, those that the stages of a pipeline share out: encoder, then decoder."""
        return self.num_layers + self.decoder_layers

    def decoder_layer_params(self) -> int:
        """Trained numbers of one layer of the decoder."""
        return self.num_layer_params() + self._cross_params()

    def resolved(self) -> T5Config:
        """The same configuration with every derived value written out."""
        return replace(GPTConfig.resolved(self), decoder_num_layers=self.decoder_layers)

    def num_params(self) -> int:
        """Trained numbers of the whole model, over all ranks, with the true vocabulary."""
        decoder = self.decoder_layers * self.decoder_layer_params() + norm_params(self)
        return GPTConfig.num_params(self) + decoder + self.vocab_size

    def flops_per_sample(self, encoder_length: int, *, decoder_length: int) -> float:
        """Floating-point operations of one training step per sample, forward and backward.

        Counted are the matrix products only, three times the forward pass; attention counts the
        pairs that the masks let through.
        """
        heads = 2 * self.num_attention_heads * self.channels
        mlp = self.hidden_size * (self.fc1_width + self.ffn_width)
        layer = attention_matmul_params(self) + mlp
        encoder = self.num_layers * encoder_length * (layer + heads * encoder_length)
        query = 2 * self.hidden_size * self.num_attention_heads * self.channels
        memory = 2 * self.hidden_size * self.kv_heads * self.channels
        own_pairs = decoder_length * (decoder_length + 1) // 2
        decoder = self.decoder_layers * (
            decoder_length * (layer + query)
            + encoder_length * memory
            + heads * (own_pairs + decoder_length * encoder_length)
        )
        head = decoder_length * self.vocab_size * self.hidden_size
        return 6.0 * (encoder + decoder + head)

    def flops_per_token(self, seq_length: int) -> float:
        """Not defined: encoder and decoder see different tokens; see `flops_per_sample`."""
        raise ValueError(
            f"a T5 has no operations per token (asked for seq_length {seq_length}): encoder and "
            f"decoder see different tokens. Ask flops_per_sample for both lengths."
        )

    def _cross_params(self) -> int:
        """Trained numbers of a layer's attention to the encoder, and of the norm before it."""
        queries = self.num_attention_heads * self.channels
        memory = 2 * self.kv_heads * self.channels
        weights = self.hidden_size * (2 * queries + memory)
        query_biases = queries + memory if self.qkv_bias else 0
        biases = query_biases + (self.hidden_size if self.add_bias else 0)
        return weights + biases + norm_params(self)
