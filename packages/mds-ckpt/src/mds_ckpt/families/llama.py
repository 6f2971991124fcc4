"""Llama and its relatives: RMS norms, rotary positions, gated MLPs, grouped key/value heads.

Mistral adds a sliding window, Qwen2 biases on query, key and value only, Qwen3 norms of query and
key heads, Mixtral experts (in a file of its own). Tensors and names are otherwise the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from mds_ckpt.families.change import Grouped, Stacked
from mds_ckpt.families.rotation import rotation_from_hf, rotation_to_hf
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
    {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh"}
)
_ARCHITECTURES = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "mixtral": "MixtralForCausalLM",
    }
)
_HALVES = ("gate", "up")
_OWN = ("qk_norm", "sliding_window", "num_key_value_heads", "head_dim", "add_bias", "normalization")
"""Fields that these families look at themselves."""


def _needs(name: str, model: ModelRecord) -> dict[str, bool]:
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


def llama_needs(model: ModelRecord, *, but: Sequence[str] = ()) -> dict[str, bool]:
    """What all of these families ask of a model, and whether it is so."""
    config = model.config
    return {
        "rotary positions": config.get("position_embedding", "learned") == "rope",
        "rotation of all channels": config.get("rope_percent", 1.0) == 1.0,
        "RMS norms": config.get("normalization", "layernorm") == "rmsnorm",
        f"one of the activations {', '.join(_ACTIVATIONS)}": config.get("activation", "gelu")
        in _ACTIVATIONS,
        **usual_needs(model, but=(*_OWN, *but)),
    }


def _faults(name: str, model: ModelRecord) -> list[str]:
    needs = llama_needs(model) | _needs(name, model)
    return [f"{name} needs {need}" for need, met in needs.items() if not met]


def llama_to_hf(name: str, model: ModelRecord) -> dict[str, Any]:
    """The members of ``config.json`` that all of these families have."""
    config, shape = model.config, Shape.of(model)
    return {
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
        **rotation_to_hf(config),
    }


def _to_hf_config(name: str, model: ModelRecord) -> dict[str, Any]:
    config, members = model.config, llama_to_hf(name, model)
    if name == "llama":
        members["attention_bias"] = members["mlp_bias"] = bool(config.get("add_bias", True))
    if name == "mistral":
        members["sliding_window"] = config.get("sliding_window")
    if name.startswith("qwen"):
        members["use_sliding_window"] = False
    if name == "qwen3":
        members["attention_bias"] = False
    return members


def llama_from_hf(name: str, config: Mapping[str, Any], **more: Any) -> ModelRecord:
    """The model of a ``config.json``; ``more`` are fields that one family adds."""
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
        **rotation_from_hf(config),
        **more,
    }
    if members.get("rope_percent", 1.0) != 1.0:
        raise ValueError("'partial_rotary_factor' is not 1, which this family does not have")
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
    config = {"sliding_window": 4096 if name == "mistral" else None} | dict(config)
    if name in ("mistral", "mixtral") and config["sliding_window"] is not None:
        return {"sliding_window": whole_number(config, "sliding_window")}
    return {"sliding_window": None}


def _mlp_rules(model: ModelRecord, layer: int) -> Iterator[Rule]:
    shape, biased = Shape.of(model), bool(model.config.get("add_bias", True))
    ours, theirs = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    h, f = shape.hidden, shape.width
    for part, rest in _parts(h, biased=biased):
        yield Rule(
            Target(f"{ours}.linear_fc1.{part}", (2 * f, *rest)),
            tuple(Target(f"{theirs}.{half}_proj.{part}", (f, *rest)) for half in _HALVES),
            Stacked(),
        )
    for part, rest in _parts(f, biased=biased):
        yield same(f"{ours}.linear_fc2.{part}", f"{theirs}.down_proj.{part}", h, *rest)


def llama_rules(
    model: ModelRecord, *, mlp: Callable[[ModelRecord, int], Iterator[Rule]] = _mlp_rules
) -> Sequence[Rule]:
    """All tensors of a model; ``mlp`` lists those of one layer's MLP."""
    shape = Shape.of(model)
    vocab = (shape.vocab, shape.hidden)
    rules = [same("embedding.word_embeddings.weight", "model.embed_tokens.weight", *vocab)]
    for layer in range(shape.layers):
        rules.extend(_attention_rules(model, shape, layer))
        rules.extend(mlp(model, layer))
    rules.append(same("decoder.final_layernorm.weight", "model.norm.weight", shape.hidden))
    if not model.tied_embeddings:
        rules.append(same("output_layer.weight", "lm_head.weight", *vocab))
    return rules


def _attention_rules(model: ModelRecord, shape: Shape, layer: int) -> Iterator[Rule]:
    """A layer's two norms and its attention."""
    ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
    h, d = shape.hidden, shape.channels
    biased = bool(model.config.get("add_bias", True))
    qkv = model.config.get("add_qkv_bias")
    grouped = Grouped(shape.groups, shape.heads // shape.groups, d)
    rows = {"q": shape.heads * d, "k": shape.groups * d, "v": shape.groups * d}
    yield same(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight", h)
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
            yield same(name, f"{theirs}.self_attn.{letter}_norm.weight", d)
    for part, rest in _parts(shape.heads * d, biased=biased):
        name = f"{ours}.self_attention.linear_proj.{part}"
        yield same(name, f"{theirs}.self_attn.o_proj.{part}", h, *rest)
    name = f"{ours}.pre_mlp_layernorm.weight"
    yield same(name, f"{theirs}.post_attention_layernorm.weight", h)


def _parts(inputs: int, *, biased: bool) -> list[tuple[str, tuple[int, ...]]]:
    """``weight`` with its input dimension, and ``bias`` without, if there is one."""
    return [("weight", (inputs,)), *([("bias", ())] if biased else [])]


IGNORED = (r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


def _family(name: str) -> Family:
    return Family(
        name=name,
        prefix="model.",
        faults=partial(_faults, name),
        to_hf_config=partial(_to_hf_config, name),
        from_hf_config=partial(llama_from_hf, name),
        rules=llama_rules,
        ignored=IGNORED,
    )


LLAMA, MISTRAL, QWEN2, QWEN3 = map(_family, ("llama", "mistral", "qwen2", "qwen3"))
