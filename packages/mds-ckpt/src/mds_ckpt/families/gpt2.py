"""GPT-2: layer norms, learned positions, biases everywhere, Conv1D weights, fused thirds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mds_ckpt.families.change import Change, Grouped, Same, Thirds, Transposed
from mds_ckpt.families.rule import (
    MOST_LAYERS,
    Family,
    Rule,
    Shape,
    Target,
    flag,
    number,
    same,
    usual_needs,
    whole_number,
)
from mds_ckpt.manifest import ModelRecord

_ACTIVATIONS = MappingProxyType(
    {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu", "relu2": "relu2", "silu": "silu"}
)
_UNLIKE_OURS = MappingProxyType(
    {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }
)
"""Switches of transformers' GPT-2 that change the result, and the value that ours has."""


def _faults(model: ModelRecord) -> list[str]:
    config = model.config
    needs = {
        "learned positions": config.get("position_embedding", "learned") == "learned",
        f"one of the activations {', '.join(_ACTIVATIONS)}": config.get("activation", "gelu")
        in _ACTIVATIONS,
        **usual_needs(model),
    }
    return [f"gpt2 needs {need}" for need, met in needs.items() if not met]


def _to_hf_config(model: ModelRecord) -> dict[str, Any]:
    config, shape = model.config, Shape.of(model)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": shape.vocab,
        "n_positions": shape.positions,
        "n_embd": shape.hidden,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": shape.width,
        "activation_function": _ACTIVATIONS[config.get("activation", "gelu")],
        "layer_norm_epsilon": config.get("norm_epsilon", 1e-5),
        "initializer_range": config.get("init_std", 0.02),
        "resid_pdrop": config.get("hidden_dropout", 0.0),
        "embd_pdrop": config.get("hidden_dropout", 0.0),
        "attn_pdrop": config.get("attention_dropout", 0.0),
        "tie_word_embeddings": model.tied_embeddings,
    }


def _from_hf_config(config: Mapping[str, Any]) -> ModelRecord:
    for key, ours in _UNLIKE_OURS.items():
        if flag(config, key, default=ours) != ours:
            raise ValueError(f"'{key}' is {config[key]!r}, which changes attention from ours")
    activation = config.get("activation_function", "gelu_new")
    known = {hf: name for name, hf in _ACTIVATIONS.items()} | {"gelu_pytorch_tanh": "gelu_tanh"}
    if activation not in known:
        raise ValueError(f"'activation_function' is {activation!r:.80}, which we don't have")
    hidden = whole_number(config, "n_embd")
    vocab = whole_number(config, "vocab_size")
    tied = flag(config, "tie_word_embeddings", default=True)
    inner = config.get("n_inner")
    return ModelRecord(
        family="gpt",
        vocab_size=vocab,
        tied_embeddings=tied,
        config={
            "num_layers": whole_number(config, "n_layer", most=MOST_LAYERS),
            "hidden_size": hidden,
            "num_attention_heads": whole_number(config, "n_head"),
            "ffn_hidden_size": 4 * hidden if inner is None else whole_number(config, "n_inner"),
            "vocab_size": vocab,
            "max_position_embeddings": whole_number(config, "n_positions"),
            "position_embedding": "learned",
            "activation": known[activation],
            "normalization": "layernorm",
            "norm_epsilon": number(config, "layer_norm_epsilon", 1e-5),
            "add_bias": True,
            "tie_embeddings": tied,
            "hidden_dropout": number(config, "resid_pdrop", 0.1),
            "attention_dropout": number(config, "attn_pdrop", 0.1),
            "init_std": number(config, "initializer_range", 0.02),
        },
    )


def _rules(model: ModelRecord) -> Sequence[Rule]:
    shape = Shape.of(model)
    h = shape.hidden
    rules = [
        same("embedding.word_embeddings.weight", "transformer.wte.weight", shape.vocab, h),
        same("embedding.position_embeddings.weight", "transformer.wpe.weight", shape.positions, h),
    ]
    for layer in range(shape.layers):
        rules.extend(_layer_rules(shape, layer))
    rules += [
        same(f"decoder.final_layernorm.{part}", f"transformer.ln_f.{part}", h)
        for part in ("weight", "bias")
    ]
    if not model.tied_embeddings:
        rules.append(same("output_layer.weight", "lm_head.weight", shape.vocab, h))
    return rules


def _layer_rules(shape: Shape, layer: int) -> Iterator[Rule]:
    ours, theirs = f"decoder.layers.{layer}", f"transformer.h.{layer}"
    h, f, rows = shape.hidden, shape.width, shape.qkv_rows
    grouped = Grouped(shape.groups, shape.heads // shape.groups, shape.channels)
    norms = {"input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2"}
    linears: dict[str, tuple[str, int, int, Change, Change]] = {
        "self_attention.linear_qkv": (
            "attn.c_attn",
            rows,
            h,
            Transposed(Thirds(grouped)),
            Thirds(grouped),
        ),
        "self_attention.linear_proj": ("attn.c_proj", h, h, Transposed(), Same()),
        "mlp.linear_fc1": ("mlp.c_fc", f, h, Transposed(), Same()),
        "mlp.linear_fc2": ("mlp.c_proj", h, f, Transposed(), Same()),
    }
    for name, hf in norms.items():
        for part in ("weight", "bias"):
            yield same(f"{ours}.{name}.{part}", f"{theirs}.{hf}.{part}", h)
    for name, (hf, outputs, inputs, change, bias_change) in linears.items():
        yield Rule(
            Target(f"{ours}.{name}.weight", (outputs, inputs)),
            (Target(f"{theirs}.{hf}.weight", (inputs, outputs)),),
            change,
        )
        yield Rule(
            Target(f"{ours}.{name}.bias", (outputs,)),
            (Target(f"{theirs}.{hf}.bias", (outputs,)),),
            bias_change,
        )


GPT2 = Family(
    name="gpt2",
    prefix="transformer.",
    faults=_faults,
    to_hf_config=_to_hf_config,
    from_hf_config=_from_hf_config,
    rules=_rules,
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),
)
