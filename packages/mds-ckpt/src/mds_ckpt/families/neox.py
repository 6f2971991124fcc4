"""GPT-NeoX (Pythia): rotation of some channels, attention and MLP side by side, biases everywhere.

Query, key and value rows lie head by head, as ours do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mds_ckpt.families.rotation import rotation_from_hf, rotation_to_hf
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

_ACTIVATIONS = MappingProxyType(
    {"gelu": "gelu", "gelu_tanh": "gelu_fast", "relu": "relu", "silu": "silu"}
)
_ALSO = MappingProxyType({"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"})
_NAMES = MappingProxyType(
    {
        "input_layernorm": "input_layernorm",
        "self_attention.linear_qkv": "attention.query_key_value",
        "self_attention.linear_proj": "attention.dense",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
    }
)
_PARTS = ("weight", "bias")


def _faults(model: ModelRecord) -> list[str]:
    config = model.config
    needs = {
        "rotary positions": config.get("position_embedding", "learned") == "rope",
        f"one of the activations {', '.join(_ACTIVATIONS)}": config.get("activation", "gelu")
        in _ACTIVATIONS,
        **usual_needs(model, but=("parallel_residual",)),
    }
    return [f"gpt_neox needs {need}" for need, met in needs.items() if not met]


def _to_hf_config(model: ModelRecord) -> dict[str, Any]:
    config, shape = model.config, Shape.of(model)
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "hidden_act": _ACTIVATIONS[config.get("activation", "gelu")],
        "max_position_embeddings": shape.positions,
        "layer_norm_eps": config.get("norm_epsilon", 1e-5),
        "initializer_range": config.get("init_std", 0.02),
        "hidden_dropout": config.get("hidden_dropout", 0.0),
        "attention_dropout": config.get("attention_dropout", 0.0),
        "use_parallel_residual": bool(config.get("parallel_residual")),
        "attention_bias": True,
        "tie_word_embeddings": model.tied_embeddings,
        **rotation_to_hf(config, theta="rotary_emb_base", share="rotary_pct"),
    }


def _from_hf_config(config: Mapping[str, Any]) -> ModelRecord:
    activation = config.get("hidden_act", "gelu")
    known = {hf: ours for ours, hf in _ACTIVATIONS.items()} | _ALSO
    if activation not in known:
        raise ValueError(f"'hidden_act' is {activation!r:.80}, which we don't have")
    if not flag(config, "attention_bias", default=True):
        raise ValueError("'attention_bias' is false, and then only the MLP would have biases")
    vocab = whole_number(config, "vocab_size")
    tied = flag(config, "tie_word_embeddings", default=False)
    rotation = rotation_from_hf(config, theta="rotary_emb_base", share="rotary_pct", default=0.25)
    return ModelRecord(
        family="gpt",
        vocab_size=vocab,
        tied_embeddings=tied,
        config={
            "num_layers": whole_number(config, "num_hidden_layers", most=MOST_LAYERS),
            "hidden_size": whole_number(config, "hidden_size"),
            "num_attention_heads": whole_number(config, "num_attention_heads"),
            "ffn_hidden_size": whole_number(config, "intermediate_size"),
            "vocab_size": vocab,
            "max_position_embeddings": whole_number(config, "max_position_embeddings"),
            "position_embedding": "rope",
            "activation": known[activation],
            "normalization": "layernorm",
            "norm_epsilon": number(config, "layer_norm_eps", 1e-5),
            "add_bias": True,
            "parallel_residual": flag(config, "use_parallel_residual", default=True),
            "tie_embeddings": tied,
            "hidden_dropout": number(config, "hidden_dropout", 0.0),
            "attention_dropout": number(config, "attention_dropout", 0.0),
            "init_std": number(config, "initializer_range", 0.02),
            **rotation,
        },
    )


def _rules(model: ModelRecord) -> Sequence[Rule]:
    shape = Shape.of(model)
    words = (shape.vocab, shape.hidden)
    rules = [same("embedding.word_embeddings.weight", "gpt_neox.embed_in.weight", *words)]
    for layer in range(shape.layers):
        rules.extend(biased_layer_rules(shape, layer, names=_NAMES, prefix="gpt_neox.layers"))
    for part in _PARTS:
        theirs = f"gpt_neox.final_layer_norm.{part}"
        rules.append(same(f"decoder.final_layernorm.{part}", theirs, shape.hidden))
    if not model.tied_embeddings:
        rules.append(same("output_layer.weight", "embed_out.weight", *words))
    return rules


NEOX = Family(
    name="gpt_neox",
    prefix="gpt_neox.",
    faults=_faults,
    to_hf_config=_to_hf_config,
    from_hf_config=_from_hf_config,
    rules=_rules,
    ignored=(r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    tied={"embed_out.weight": "embedding.word_embeddings.weight"},
    renamed=((r"^lm_head\.", "embed_out."),),
)
