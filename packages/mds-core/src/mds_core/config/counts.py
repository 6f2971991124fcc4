"""Parameters and floating-point operations that follow from a shape alone."""

from __future__ import annotations

from mds_core.config.shape import Shape
from mds_core.expert_plan import mlp_params, routed_active_weights, routed_params

__all__ = [
    "attention_matmul_params",
    "flops_per_token",
    "layer_params",
    "model_params",
    "norm_params",
]


def model_params(config: Shape) -> int:
    """Trained numbers of the whole model, over all ranks, with the true vocabulary."""
    embedding = config.vocab_size * config.hidden_size
    if config.position_embedding == "learned":
        embedding += config.max_position_embeddings * config.hidden_size
    if config.embedding_norm:
        embedding += norm_params(config)
    head = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    layers = sum(layer_params(config, layer) for layer in range(config.num_layers))
    return embedding + layers + norm_params(config) + head


def layer_params(config: Shape, layer: int) -> int:
    """Trained numbers of one transformer layer."""
    biases = config.qkv_width if config.qkv_bias else 0
    biases += config.hidden_size if config.add_bias else 0
    per_head = config.channels * (2 if config.normalization == "layernorm" else 1)
    qk_norms = 2 * per_head if config.qk_norm else 0
    attention = attention_matmul_params(config) + biases + qk_norms
    return attention + _mlp_params(config, layer) + 2 * norm_params(config)


def _mlp_params(config: Shape, layer: int) -> int:
    if experts := config.experts[layer]:
        return routed_params(config, experts=experts)
    return mlp_params(config, width=config.ffn_width)


def flops_per_token(config: Shape, seq_length: int) -> float:
    """Floating-point operations of a training step per token; see `GPTConfig.flops_per_token`."""
    window = min(config.sliding_window or seq_length, seq_length)
    pairs = window * (window + 1) // 2 + (seq_length - window) * window
    attention = 2 * config.num_attention_heads * config.channels * pairs / seq_length
    layers = config.num_layers * (attention_matmul_params(config) + attention)
    mlps = sum(
        routed_active_weights(config, experts=experts)
        if experts
        else config.hidden_size * (config.fc1_width + config.ffn_width)
        for experts in config.experts
    )
    return 6.0 * (layers + mlps + config.vocab_size * config.hidden_size)


def attention_matmul_params(config: Shape) -> int:
    """Weights of one layer's projections around attention."""
    return config.hidden_size * (config.qkv_width + config.num_attention_heads * config.channels)


def norm_params(config: Shape) -> int:
    """Trained numbers of one norm of the residual stream."""
    return config.hidden_size * (2 if config.normalization == "layernorm" else 1)
