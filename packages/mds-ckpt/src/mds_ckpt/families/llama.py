"""Llama and its relatives: RMS norms, rotary positions, gated MLPs, grouped key/value heads.

Mistral adds a sliding window, Qwen2 biases on query, key and value only, Qwen3 norms of query and
key heads. Tensors and names are otherwise the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from mds_ckpt.families.change import Grouped, Same, Stacked
from mds_ckpt.families.rule import (
    MOST_LAYERS,
    Family,
    Rule,
    Shape,
    Target,
    flag,
    number,
    whole_number,
)
from mds_ckpt.manifest import ModelRecord

_ACTIVATIONS = MappingProxyType(
    {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh"}
)
_ARCHITECTURES = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }
)
_HALVES = ("gate", "up")
_ROPE_KEYS = frozenset(
    {"rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings"}
    | {"low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow"}
    | {"short_factor", "long_factor", "mscale", "mscale_all_dim", "truncate"}
    | {"partial_rotary_factor"}
)


def _needs(name: str, model: ModelRecord) -> Mapping[str, bool]:
    """What family ``name`` asks of a model beyond being of this kind, and whether it is so."""
    config = model.config
    biased = bool(config.get("add_bias", True))
    qkv = config.get("add_qkv_bias")
    qkv_biased = biased if qkv is None else bool(qkv)
    window = config.get("sliding_window") is not None
    norms = bool(config.get("qk_norm"))
    return {
        "llama": {
            "biases everywhere or nowhere": qkv_biased == biased,
            "no sliding window": not window,
            "no query/key norms": not norms,
        },
        "mistral": {
            "no biases": not (biased or qkv_biased),
            "no query/key norms": not norms,
        },
        "qwen2": {
            "biases on query, key and value only": qkv_biased and not biased,
            "no sliding window": not window,
            "no query/key norms": not norms,
        },
        "qwen3": {
            "no biases": not (biased or qkv_biased),
            "no sliding window": not window,
            "query/key norms": norms,
        },
    }[name]


def _faults(name: str, model: ModelRecord) -> list[str]:
    config = model.config
    needs = {
        "rotary positions": config.get("position_embedding", "learned") == "rope",
        "rotation of all channels": config.get("rope_percent", 1.0) == 1.0,
        "RMS norms": config.get("normalization", "layernorm") == "rmsnorm",
        "norm weights that are not stored minus one": not config.get("zero_centered_norm"),
        f"one of the activations {', '.join(_ACTIVATIONS)}": config.get("activation", "gelu")
        in _ACTIVATIONS,
        **_needs(name, model),
        "attention and MLP one after the other": not config.get("parallel_residual"),
        "no norm of the embeddings": not config.get("embedding_norm"),
        "norms before, not after the residual": not config.get("residual_post_layernorm"),
    }
    return [f"{name} needs {need}" for need, met in needs.items() if not met]


def _to_hf_config(name: str, model: ModelRecord) -> dict[str, Any]:
    config, shape = model.config, Shape.of(model)
    theta = config.get("rope_theta", 10000.0)
    rope = dict(config.get("rope_scaling") or {"rope_type": "default"})
    members: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[name]],
        "model_type": name,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups,
        "head_dim": shape.channels,
        "hidden_act": _ACTIVATIONS[config["activation"]],
        "max_position_embeddings": shape.positions,
        "initializer_range": config.get("init_std", 0.02),
        "rms_norm_eps": config.get("norm_epsilon", 1e-5),
        "attention_dropout": config.get("attention_dropout", 0.0),
        "tie_word_embeddings": model.tied_embeddings,
        # transformers up to 4 reads the first two, from 5 on the third.
        "rope_theta": theta,
        "rope_scaling": config.get("rope_scaling"),
        "rope_parameters": rope | {"rope_theta": theta},
    }
    if name == "llama":
        members["attention_bias"] = members["mlp_bias"] = bool(config.get("add_bias", True))
    if name == "mistral":
        members["sliding_window"] = config.get("sliding_window")
    if name.startswith("qwen"):
        members["use_sliding_window"] = False
    if name == "qwen3":
        members["attention_bias"] = False
    return members


def _from_hf_config(name: str, config: Mapping[str, Any]) -> ModelRecord:
    ours = {hf: activation for activation, hf in _ACTIVATIONS.items()}
    activation = config.get("hidden_act", "silu")
    if activation not in ours:
        raise ValueError(f"'hidden_act' is {activation!r:.80}, which we don't have")
    vocab = whole_number(config, "vocab_size")
    tied = flag(config, "tie_word_embeddings", default=False)
    members: dict[str, Any] = {
        "num_layers": whole_number(config, "num_hidden_layers", most=MOST_LAYERS),
        "hidden_size": whole_number(config, "hidden_size"),
        "num_attention_heads": whole_number(config, "num_attention_heads"),
        "ffn_hidden_size": whole_number(config, "intermediate_size"),
        "vocab_size": vocab,
        "max_position_embeddings": whole_number(config, "max_position_embeddings"),
        "position_embedding": "rope",
        "activation": ours[activation],
        "normalization": "rmsnorm",
        "norm_epsilon": number(config, "rms_norm_eps", 1e-6),
        "qk_norm": name == "qwen3",
        "tie_embeddings": tied,
        "attention_dropout": number(config, "attention_dropout", 0.0),
        "init_std": number(config, "initializer_range", 0.02),
        **_heads(name, config),
        **_biases(name, config),
        **_window(name, config),
        **_rope(config),
    }
    return ModelRecord(family="gpt", config=members, vocab_size=vocab, tied_embeddings=tied)


def _heads(name: str, config: Mapping[str, Any]) -> dict[str, int]:
    sizes = {}
    if config.get("num_key_value_heads") is not None or name != "llama":
        sizes["num_key_value_heads"] = whole_number(config, "num_key_value_heads")
    if config.get("head_dim") is not None:
        sizes["head_dim"] = whole_number(config, "head_dim")
    elif name == "qwen3":
        sizes["head_dim"] = 128  # transformers' default, whatever the other sizes
    return sizes


def _biases(name: str, config: Mapping[str, Any]) -> dict[str, bool]:
    attention = flag(config, "attention_bias", default=False)
    if name == "llama" and attention != flag(config, "mlp_bias", default=False):
        raise ValueError("'attention_bias' and 'mlp_bias' differ, which our model does not have")
    if name != "llama" and attention:
        raise ValueError(f"'attention_bias' is set, which our {name} does not have")
    return {"add_bias": attention, "add_qkv_bias": attention or name == "qwen2"}


def _window(name: str, config: Mapping[str, Any]) -> dict[str, int | None]:
    if name.startswith("qwen") and flag(config, "use_sliding_window", default=False):
        raise ValueError("'use_sliding_window' is set, which our model has for all layers only")
    config = {"sliding_window": 4096} | dict(config)
    if name == "mistral" and config["sliding_window"] is not None:
        return {"sliding_window": whole_number(config, "sliding_window")}
    return {"sliding_window": None}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotation from ``rope_parameters`` (transformers 5) or ``rope_theta``, ``rope_scaling``."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping) or not parameters.keys() <= _ROPE_KEYS:
        raise ValueError("'rope_parameters' is not an object of members that we know")
    theta = number(parameters, "rope_theta", number(config, "rope_theta", 10000.0))
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    if number(scaling, "partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("'partial_rotary_factor' is not 1, which this family does not have")
    scaling.pop("partial_rotary_factor", None)
    if scaling.get("rope_type", scaling.get("type", "default")) == "default":
        return {"rope_theta": theta}
    return {"rope_theta": theta, "rope_scaling": scaling}


def _rules(model: ModelRecord) -> Sequence[Rule]:
    shape = Shape.of(model)
    vocab = (shape.vocab, shape.hidden)
    rules = [_same("embedding.word_embeddings.weight", "model.embed_tokens.weight", vocab)]
    for layer in range(shape.layers):
        rules.extend(_layer_rules(model, shape, layer))
    rules.append(_same("decoder.final_layernorm.weight", "model.norm.weight", (shape.hidden,)))
    if not model.tied_embeddings:
        rules.append(_same("output_layer.weight", "lm_head.weight", vocab))
    return rules


def _layer_rules(model: ModelRecord, shape: Shape, layer: int) -> Iterator[Rule]:
    ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
    h, f, d = shape.hidden, shape.width, shape.channels
    biased = bool(model.config.get("add_bias", True))
    qkv = model.config.get("add_qkv_bias")
    grouped = Grouped(shape.groups, shape.heads // shape.groups, d)
    rows = {"q": shape.heads * d, "k": shape.groups * d, "v": shape.groups * d}
    yield _same(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight", (h,))
    for part, rest in _parts(h, biased=biased if qkv is None else bool(qkv)):
        yield Rule(
            Target(f"{ours}.self_attention.linear_qkv.{part}", (shape.qkv_rows, *rest)),
            tuple(
                Target(f"{theirs}.self_attn.{letter}_proj.{part}", (count, *rest))
                for letter, count in rows.items()
            ),
            grouped,
        )
    if model.config.get("qk_norm"):
        for letter in "qk":
            name = f"{ours}.self_attention.{letter}_layernorm.weight"
            yield _same(name, f"{theirs}.self_attn.{letter}_norm.weight", (d,))
    for part, rest in _parts(shape.heads * d, biased=biased):
        name = f"{ours}.self_attention.linear_proj.{part}"
        yield _same(name, f"{theirs}.self_attn.o_proj.{part}", (h, *rest))
    name = f"{ours}.pre_mlp_layernorm.weight"
    yield _same(name, f"{theirs}.post_attention_layernorm.weight", (h,))
    for part, rest in _parts(h, biased=biased):
        yield Rule(
            Target(f"{ours}.mlp.linear_fc1.{part}", (2 * f, *rest)),
            tuple(Target(f"{theirs}.mlp.{half}_proj.{part}", (f, *rest)) for half in _HALVES),
            Stacked(),
        )
    for part, rest in _parts(f, biased=biased):
        yield _same(f"{ours}.mlp.linear_fc2.{part}", f"{theirs}.mlp.down_proj.{part}", (h, *rest))


def _parts(inputs: int, *, biased: bool) -> list[tuple[str, tuple[int, ...]]]:
    """``weight`` with its input dimension, and ``bias`` without, if there is one."""
    return [("weight", (inputs,)), *([("bias", ())] if biased else [])]


def _same(canonical: str, hf: str, shape: tuple[int, ...]) -> Rule:
    return Rule(Target(canonical, shape), (Target(hf, shape),), Same())


def _family(name: str) -> Family:
    return Family(
        name=name,
        prefix="model.",
        faults=partial(_faults, name),
        to_hf_config=partial(_to_hf_config, name),
        from_hf_config=partial(_from_hf_config, name),
        rules=_rules,
        ignored=(r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
    )


LLAMA, MISTRAL, QWEN2, QWEN3 = map(_family, _ARCHITECTURES)
