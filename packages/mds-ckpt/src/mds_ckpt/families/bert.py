"""BERT: the published one (norms behind the residual) and Megatron's (norms before it).

In the published form our norms are shifted by one: what stands behind a layer is what the next
layer's input has passed. Heads are optional: which there are, the names of the tensors tell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from mds_ckpt.families.change import Grouped
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

_ACTIVATIONS = MappingProxyType({"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"})
_CLASSES = MappingProxyType({"bert": "Bert", "megatron-bert": "MegatronBert"})
_PARTS = ("weight", "bias")
_THIRDS = ("query", "key", "value")
_WORDS = "embedding.word_embeddings.weight"
_OLD_NAMES = (
    (r"LayerNorm\.gamma$", "LayerNorm.weight"),
    (r"LayerNorm\.beta$", "LayerNorm.bias"),
)
"""From the time of TensorFlow."""


@dataclass(frozen=True, slots=True)
class _Heads:
    """What stands on the encoder."""

    words: bool
    pooler: bool
    binary: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Heads:
        binary = bool(config.get("binary_head", True))
        pooler = bool(config.get("pooler", binary))
        return cls(bool(config.get("word_head", True)), pooler, binary)

    @property
    def architecture(self) -> str:
        """The end of the name of transformers' class."""
        if self.words:
            return "ForPreTraining" if self.pooler and self.binary else "ForMaskedLM"
        return "ForNextSentencePrediction" if self.binary else "Model"

    @property
    def prefix(self) -> str:
        """What stands before the encoder's names, where it is part of something larger."""
        return "bert." if self.words or self.binary else ""


def _is_post(name: str) -> bool:
    return name == "bert"


def _faults(name: str, model: ModelRecord) -> list[str]:
    config, heads = model.config, _Heads.of(model.config)
    post = bool(config.get("residual_post_layernorm"))
    order = "norms behind the residual" if _is_post(name) else "norms before the residual"
    needs = {
        order: post == _is_post(name),
        "learned positions": config.get("position_embedding", "learned") == "learned",
        f"one of the activations {', '.join(_ACTIVATIONS)}": config.get("activation", "gelu")
        in _ACTIVATIONS,
        "kinds of segments": bool(config.get("num_token_types", 2)),
        "tied embeddings": model.tied_embeddings,
        "a pooler with the binary head only, or without heads": heads.pooler == heads.binary
        or not (heads.words or heads.binary),
        **usual_needs(model, but=("residual_post_layernorm",)),
    }
    return [f"{name} needs {need}" for need, met in needs.items() if not met]


def _to_hf_config(name: str, model: ModelRecord) -> dict[str, Any]:
    config, shape = model.config, Shape.of(model)
    return {
        "architectures": [_CLASSES[name] + _Heads.of(config).architecture],
        "model_type": name,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "hidden_act": _ACTIVATIONS[config.get("activation", "gelu")],
        "max_position_embeddings": shape.positions,
        "type_vocab_size": config.get("num_token_types", 2),
        "layer_norm_eps": config.get("norm_epsilon", 1e-5),
        "initializer_range": config.get("init_std", 0.02),
        "hidden_dropout_prob": config.get("hidden_dropout", 0.0),
        "attention_probs_dropout_prob": config.get("attention_dropout", 0.0),
        "tie_word_embeddings": True,
    }


def _from_hf_config(name: str, config: Mapping[str, Any]) -> ModelRecord:
    known = {hf: ours for ours, hf in _ACTIVATIONS.items()} | {"gelu_pytorch_tanh": "gelu_tanh"}
    activation = config.get("hidden_act", "gelu")
    if activation not in known:
        raise ValueError(f"'hidden_act' is {activation!r:.80}, which we don't have")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ValueError("'position_embedding_type' is not 'absolute', which is all that we have")
    for key in ("is_decoder", "add_cross_attention"):
        if flag(config, key, default=False):
            raise ValueError(f"'{key}' is set, and our BERT is an encoder")
    if not flag(config, "tie_word_embeddings", default=True):
        raise ValueError("'tie_word_embeddings' is false, and our BERT ties them")
    vocab = whole_number(config, "vocab_size")
    members = {
        "num_layers": whole_number(config, "num_hidden_layers", most=MOST_LAYERS),
        "hidden_size": whole_number(config, "hidden_size"),
        "num_attention_heads": whole_number(config, "num_attention_heads"),
        "ffn_hidden_size": whole_number(config, "intermediate_size"),
        "vocab_size": vocab,
        "max_position_embeddings": whole_number(config, "max_position_embeddings"),
        "num_token_types": whole_number({"type_vocab_size": 2} | dict(config), "type_vocab_size"),
        "position_embedding": "learned",
        "activation": known[activation],
        "normalization": "layernorm",
        "norm_epsilon": number(config, "layer_norm_eps", 1e-12),
        "residual_post_layernorm": _is_post(name),
        "add_bias": True,
        "tie_embeddings": True,
        "hidden_dropout": number(config, "hidden_dropout_prob", 0.1),
        "attention_dropout": number(config, "attention_probs_dropout_prob", 0.1),
        "init_std": number(config, "initializer_range", 0.02),
    }
    return ModelRecord(family="bert", config=members, vocab_size=vocab, tied_embeddings=True)


def _present(model: ModelRecord, names: Collection[str]) -> ModelRecord:
    """The model with the heads that stored names show."""
    heads = {
        "word_head": any(name.startswith("cls.predictions.") for name in names),
        "pooler": any("pooler.dense." in name for name in names),
        "binary_head": any(name.startswith("cls.seq_relationship.") for name in names),
    }
    return replace(model, config={**model.config, **heads})


def _rules(name: str, model: ModelRecord) -> Sequence[Rule]:
    shape, heads = Shape.of(model), _Heads.of(model.config)
    h, prefix = shape.hidden, heads.prefix
    tables = {
        "word": ("word", shape.vocab),
        "position": ("position", shape.positions),
        "tokentype": ("token_type", model.config.get("num_token_types", 2)),
    }
    rules = [
        same(
            f"embedding.{ours}_embeddings.weight",
            f"{prefix}embeddings.{theirs}_embeddings.weight",
            rows,
            h,
        )
        for ours, (theirs, rows) in tables.items()
    ]
    norms = _post_norms(shape.layers) if _is_post(name) else _pre_norms(shape.layers)
    for ours, theirs in norms.items():
        rules += [same(f"{ours}.{part}", f"{prefix}{theirs}.{part}", h) for part in _PARTS]
    for layer in range(shape.layers):
        rules.extend(_layer_rules(shape, prefix, layer))
    rules.extend(_head_rules(shape, heads))
    return rules


def _post_norms(layers: int) -> dict[str, str]:
    """Our norms, and what the published BERT calls them."""
    norms = {"encoder.layers.0.input_layernorm": "embeddings.LayerNorm"}
    for layer in range(layers):
        ours, theirs = f"encoder.layers.{layer}", f"encoder.layer.{layer}"
        norms[f"{ours}.pre_mlp_layernorm"] = f"{theirs}.attention.output.LayerNorm"
        is_last = layer == layers - 1
        behind = f"encoder.layers.{layer + 1}.input_layernorm"
        norms["encoder.final_layernorm" if is_last else behind] = f"{theirs}.output.LayerNorm"
    return norms


def _pre_norms(layers: int) -> dict[str, str]:
    """Our norms, and what transformers' Megatron BERT calls them."""
    norms = {}
    for layer in range(layers):
        ours, theirs = f"encoder.layers.{layer}", f"encoder.layer.{layer}"
        norms[f"{ours}.input_layernorm"] = f"{theirs}.attention.ln"
        norms[f"{ours}.pre_mlp_layernorm"] = f"{theirs}.ln"
    return norms | {"encoder.final_layernorm": "encoder.ln"}


def _layer_rules(shape: Shape, prefix: str, layer: int) -> Iterator[Rule]:
    ours, theirs = f"encoder.layers.{layer}", f"{prefix}encoder.layer.{layer}"
    h, f = shape.hidden, shape.width
    linears = {
        "self_attention.linear_proj": ("attention.output.dense", h, h),
        "mlp.linear_fc1": ("intermediate.dense", f, h),
        "mlp.linear_fc2": ("output.dense", h, f),
    }
    for part in _PARTS:
        rest = (h,) if part == "weight" else ()
        yield Rule(
            Target(f"{ours}.self_attention.linear_qkv.{part}", (3 * h, *rest)),
            tuple(
                Target(f"{theirs}.attention.self.{third}.{part}", (h, *rest)) for third in _THIRDS
            ),
            Grouped(shape.heads, 1, shape.channels),
        )
        for name, (hf, outputs, inputs) in linears.items():
            size = (outputs, inputs) if part == "weight" else (outputs,)
            yield same(f"{ours}.{name}.{part}", f"{theirs}.{hf}.{part}", *size)


def _head_rules(shape: Shape, heads: _Heads) -> Iterator[Rule]:
    h = shape.hidden
    squares = {}
    if heads.pooler:
        squares["pooler.dense"] = f"{heads.prefix}pooler.dense"
    if heads.words:
        squares["lm_head.dense"] = "cls.predictions.transform.dense"
        yield same("output_layer.bias", "cls.predictions.bias", shape.vocab)
        for part in _PARTS:
            theirs = f"cls.predictions.transform.LayerNorm.{part}"
            yield same(f"lm_head.layer_norm.{part}", theirs, h)
    for ours, hf in squares.items():
        yield same(f"{ours}.weight", f"{hf}.weight", h, h)
        yield same(f"{ours}.bias", f"{hf}.bias", h)
    if heads.binary:
        yield same("binary_head.weight", "cls.seq_relationship.weight", 2, h)
        yield same("binary_head.bias", "cls.seq_relationship.bias", 2)


def _family(name: str) -> Family:
    return Family(
        name=name,
        kind="bert",
        prefix="bert.",
        faults=partial(_faults, name),
        to_hf_config=partial(_to_hf_config, name),
        from_hf_config=partial(_from_hf_config, name),
        rules=partial(_rules, name),
        ignored=(r"(bert\.)?embeddings\.(position_ids|token_type_ids)",),
        tied={
            "cls.predictions.decoder.weight": _WORDS,
            "cls.predictions.decoder.bias": "output_layer.bias",
        },
        renamed=(
            (r"LayerNorm\.gamma$", "LayerNorm.weight"),
            (r"LayerNorm\.beta$", "LayerNorm.bias"),
        ),
        present=_present,
    )


BERT, MEGATRON_BERT = map(_family, _CLASSES)
