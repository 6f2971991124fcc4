"""A family's description as data: which tensors it has, under which names, in which shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mds_ckpt.families.change import Change, Same
from mds_ckpt.manifest import ModelRecord

MOST_LAYERS = 10_000
_WORDS = "embedding.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor's name and shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """One canonical tensor, its Hugging Face counterparts, and how they turn into each other."""

    canonical: Target
    hf: tuple[Target, ...]
    change: Change

    @property
    def is_same(self) -> bool:
        """Whether the two are stored alike, so that parts can be read without the rest."""
        return isinstance(self.change, Same)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One kind of model: what it can express, and how it is stored by transformers."""

    name: str
    """transformers' ``model_type``."""
    prefix: str
    """What names of tensors lose when only the base model was saved."""
    faults: Callable[[ModelRecord], Sequence[str]]
    """What of a model this family can't express, as sentences; empty if it can all of it."""
    to_hf_config: Callable[[ModelRecord], dict[str, Any]]
    """``config.json`` of a model that it can express."""
    from_hf_config: Callable[[Mapping[str, Any]], ModelRecord]
    """The model that a ``config.json`` describes; ValueError for what we can't express."""
    rules: Callable[[ModelRecord], Sequence[Rule]]
    """All tensors of a model."""
    ignored: Sequence[str] = ()
    """Regular expressions of tensors that hold no weights (masks, frequencies)."""
    kind: str = "gpt"
    """The family of our own models that it is a form of."""
    tied: Mapping[str, str] = field(default_factory=lambda: {"lm_head.weight": _WORDS})
    """Tensors that some files repeat, and the canonical name of what they must be equal to."""
    renamed: Sequence[tuple[str, str]] = ()
    """Old spellings of names: a regular expression and its replacement."""
    present: Callable[[ModelRecord, Collection[str]], ModelRecord] = lambda model, _: model
    """The model with the optional parts that stored names show, which no configuration tells."""
    notes: Callable[[ModelRecord], Sequence[str]] = lambda _: ()
    """What a user of the written model should know, as sentences."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that rules are made of, from a model's configuration."""

    layers: int
    hidden: int
    heads: int
    groups: int
    channels: int
    width: int
    positions: int
    vocab: int
    """Rows of the embedding: the true vocabulary, or the padded one where padding is kept."""

    @classmethod
    def of(cls, model: ModelRecord) -> Shape:
        """The sizes of ``model``, with the defaults of mds-core's configuration."""
        config = model.config
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        width = config.get("ffn_hidden_size")
        if width is None:
            gated = "glu" in str(config.get("activation", "gelu"))
            width = 8 * hidden // 3 // 64 * 64 if gated else 4 * hidden
        return cls(
            layers=config["num_layers"],
            hidden=hidden,
            heads=heads,
            groups=config.get("num_key_value_heads") or heads,
            channels=config.get("head_dim") or hidden // heads,
            width=width,
            positions=config["max_position_embeddings"],
            vocab=model.padded_vocab_size or model.vocab_size,
        )

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused projection."""
        return (self.heads + 2 * self.groups) * self.channels


def same(canonical: str, hf: str, *shape: int) -> Rule:
    """A tensor that both store alike."""
    return Rule(Target(canonical, shape), (Target(hf, shape),), Same())


def biased_layer_rules(
    shape: Shape, layer: int, *, names: Mapping[str, str], prefix: str
) -> Iterator[Rule]:
    """Weight and bias of everything in a layer that both store alike (GPT-NeoX, BLOOM).

    Args:
        shape: Sizes of the model.
        layer: Its number.
        names: Our name of each part of a layer, and theirs.
        prefix: What their layers' names begin with, before the number.
    """
    h, f = shape.hidden, shape.width
    sizes = {
        "self_attention.linear_qkv": (shape.qkv_rows, h),
        "self_attention.linear_proj": (h, h),
        "mlp.linear_fc1": (f, h),
        "mlp.linear_fc2": (h, f),
    }
    for ours, theirs in names.items():
        size = sizes.get(ours, (h,))
        for part, extents in (("weight", size), ("bias", size[:1])):
            name = f"{prefix}.{layer}.{theirs}.{part}"
            yield same(f"decoder.layers.{layer}.{ours}.{part}", name, *extents)


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether any layer of a model shares its tokens out among experts."""
    return bool(config.get("num_experts")) or any(
        count > 1 for count in config.get("layer_experts") or ()
    )


def usual_needs(model: ModelRecord, *, but: Collection[str] = ()) -> dict[str, bool]:
    """What most families ask of a model, and whether it is so.

    Args:
        model: The model.
        but: Fields of the configuration that the family looks at itself.
    """
    config, shape = model.config, Shape.of(model)
    window, norms = config.get("sliding_window"), config.get("qk_norm")
    needs = {
        "num_experts": ("one MLP for all tokens", not has_experts(config)),
        "parallel_residual": (
            "attention and MLP one after the other",
            not config.get("parallel_residual"),
        ),
        "embedding_norm": ("no norm of the embeddings", not config.get("embedding_norm")),
        "residual_post_layernorm": (
            "norms before, not after the residual",
            not config.get("residual_post_layernorm"),
        ),
        "zero_centered_norm": (
            "norm weights that are not stored minus one",
            not config.get("zero_centered_norm"),
        ),
        "qk_norm": ("no query/key norms", not norms),
        "sliding_window": ("no sliding window", window is None),
        "num_key_value_heads": (
            "as many key/value as query heads",
            shape.groups == shape.heads,
        ),
        "head_dim": (
            "head_dim = hidden_size / heads",
            shape.channels * shape.heads == shape.hidden,
        ),
        "add_bias": (
            "biases",
            bool(config.get("add_bias", True)) and config.get("add_qkv_bias") is not False,
        ),
        "normalization": ("layer norms", config.get("normalization", "layernorm") == "layernorm"),
    }
    return dict(need for name, need in needs.items() if name not in but)


def whole_number(config: Mapping[str, Any], key: str, *, most: int = 2**31) -> int:
    """A size in a ``config.json``; ValueError unless it is a whole number from 1 to ``most``."""
    value = config.get(key)
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"'{key}' is {value!r:.80}, not a whole number from 1 to {most}")
    return int(value)


def number(config: Mapping[str, Any], key: str, default: float) -> float:
    """A positive number or zero in a ``config.json``; ValueError for anything else."""
    value = config.get(key, default)
    if type(value) not in {int, float} or not 0 <= value < math.inf:
        raise ValueError(f"'{key}' is {value!r:.80}, not a number")
    return float(value)


def flag(config: Mapping[str, Any], key: str, *, default: bool) -> bool:
    """A switch in a ``config.json``; ValueError unless it is true, false or absent."""
    value = config.get(key, default)
    if type(value) is not bool:
        raise ValueError(f"'{key}' is {value!r:.80}, not true or false")
    return value
