"""BLOOM: ALiBi in place of positions, a norm of the token vectors, tanh GELU, biases everywhere.

Query, key and value rows lie head by head, as ours do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mds_ckpt.families.rule import (
    MOST_LAYERS,
    Family,
    Rule,
    Shape,
    biased_layer_rules,
    flag,
    number,
    same,
    usual_needs,
    whole_number,
)
from mds_ckpt.manifest import ModelRecord

_NAMES = MappingProxyType(
    {
        "input_layernorm": "input_layernorm",
        "self_attention.linear_qkv": "self_attention.query_key_value",
        "self_attention.linear_proj": "self_attention.dense",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
    }
)
_PARTS = ("weight", "bias")
_LENGTH = 2048
"""Positions that BLOOM was trained with; transformers does not say, ALiBi has no limit."""


def _faults(model: ModelRecord) -> list[str]:
    config, shape = model.config, Shape.of(model)
    needs = {
        "ALiBi": config.get("position_embedding", "learned") == "alibi",
        "a norm of the embeddings": bool(config.get("embedding_norm")),
        "the activation gelu_tanh": config.get("activation", "gelu") == "gelu_tanh",
        "an MLP of 4 * hidden_size": shape.width == 4 * shape.hidden,
        **usual_needs(model, but=("embedding_norm", "residual_post_layernorm")),
    }
    return [f"bloom needs {need}" for need, met in needs.items() if not met]


def _to_hf_config(model: ModelRecord) -> dict[str, Any]:
    config, shape = model.config, Shape.of(model)
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "seq_length": shape.positions,
        "layer_norm_epsilon": config.get("norm_epsilon", 1e-5),
        "initializer_range": config.get("init_std", 0.02),
        "hidden_dropout": config.get("hidden_dropout", 0.0),
        "attention_dropout": config.get("attention_dropout", 0.0),
        "apply_residual_connection_post_layernorm": bool(config.get("residual_post_layernorm")),
        "tie_word_embeddings": model.tied_embeddings,
    }


def _from_hf_config(config: Mapping[str, Any]) -> ModelRecord:
    # Early configurations call it n_embed.
    hidden = whole_number(config, "n_embed" if config.get("hidden_size") is None else "hidden_size")
    config = {"seq_length": _LENGTH} | dict(config)
    vocab = whole_number(config, "vocab_size")
    tied = flag(config, "tie_word_embeddings", default=True)
    return ModelRecord(
        family="gpt",
        vocab_size=vocab,
        tied_embeddings=tied,
        config={
            "num_layers": whole_number(config, "n_layer", most=MOST_LAYERS),
            "hidden_size": hidden,
            "num_attention_heads": whole_number(
                config, "num_attention_heads" if config.get("n_head") is None else "n_head"
            ),
            "ffn_hidden_size": 4 * hidden,
            "vocab_size": vocab,
            "max_position_embeddings": whole_number(config, "seq_length"),
            "position_embedding": "alibi",
            "activation": "gelu_tanh",
            "normalization": "layernorm",
            "norm_epsilon": number(config, "layer_norm_epsilon", 1e-5),
            "embedding_norm": True,
            "residual_post_layernorm": flag(
                config, "apply_residual_connection_post_layernorm", default=False
            ),
            "add_bias": True,
            "tie_embeddings": tied,
            "hidden_dropout": number(config, "hidden_dropout", 0.0),
            "attention_dropout": number(config, "attention_dropout", 0.0),
            "init_std": number(config, "initializer_range", 0.02),
        },
    )


def _rules(model: ModelRecord) -> Sequence[Rule]:
    shape = Shape.of(model)
    h, words = shape.hidden, (shape.vocab, shape.hidden)
    table = "transformer.word_embeddings"
    rules = [same("embedding.word_embeddings.weight", f"{table}.weight", *words)]
    rules += [
        same(f"embedding.layernorm.{part}", f"{table}_layernorm.{part}", h) for part in _PARTS
    ]
    for layer in range(shape.layers):
        rules.extend(biased_layer_rules(shape, layer, names=_NAMES, prefix="transformer.h"))
    rules += [
        same(f"decoder.final_layernorm.{part}", f"transformer.ln_f.{part}", h) for part in _PARTS
    ]
    if not model.tied_embeddings:
        rules.append(same("output_layer.weight", "lm_head.weight", *words))
    return rules


BLOOM = Family(
    name="bloom",
    prefix="transformer.",
    faults=_faults,
    to_hf_config=_to_hf_config,
    from_hf_config=_from_hf_config,
    rules=_rules,
)
