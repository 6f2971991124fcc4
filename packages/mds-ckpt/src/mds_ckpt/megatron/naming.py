"""Names of parameters in Megatron's and DeepSpeed's files, and the canonical ones for them.

Canonical names are Megatron-core's. A name also says how tensor-parallel ranks share the parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

__all__ = [
    "BUFFERS",
    "Named",
    "Sharing",
    "block_name",
    "canonical_name",
    "expert_of",
    "flatten",
    "megatron_order",
    "module_name",
    "stored_block_name",
    "stored_module_name",
    "with_expert",
]

BUFFERS = ("_extra_state", ".inv_freq", ".masked_bias", ".attn_mask")
"""Ends of names of tensors that a module keeps and that are no parameters."""
Sharing = Literal["replicated", "column", "row", "vocab", "qkv", "query", "key_value", "gated"]
"""How ranks share a parameter: rows of the output, columns of the input, or a special row order."""


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter's canonical name and how ranks share it."""

    name: str
    sharing: Sharing
    layout: Literal["thirds"] | None = None
    """The row order, where the stored name settles it."""


_LINEARS: Mapping[str, tuple[str, Sharing, Sharing]] = MappingProxyType(
    {
        "self_attention.query_key_value": ("self_attention.linear_qkv", "qkv", "qkv"),
        "self_attention.query": ("self_attention.linear_qkv", "query", "query"),
        "self_attention.key_value": ("self_attention.linear_qkv", "key_value", "key_value"),
        "self_attention.dense": ("self_attention.linear_proj", "row", "replicated"),
        "inter_attention.query": ("cross_attention.linear_q", "column", "column"),
        "inter_attention.key_value": ("cross_attention.linear_kv", "column", "column"),
        "inter_attention.dense": ("cross_attention.linear_proj", "row", "replicated"),
        "mlp.dense_h_to_4h": ("mlp.linear_fc1", "gated", "gated"),
        "mlp.dense_4h_to_h": ("mlp.linear_fc2", "row", "replicated"),
        "mlp.mlp.dense_h_to_4h": ("mlp.shared_experts.linear_fc1", "gated", "gated"),
        "mlp.mlp.dense_4h_to_h": ("mlp.shared_experts.linear_fc2", "row", "replicated"),
        "self_attention.linear_qkv": ("self_attention.linear_qkv", "qkv", "qkv"),
        "self_attention.linear_proj": ("self_attention.linear_proj", "row", "replicated"),
        "mlp.linear_fc1": ("mlp.linear_fc1", "gated", "gated"),
        "mlp.linear_fc2": ("mlp.linear_fc2", "row", "replicated"),
        "mlp.shared_experts.linear_fc1": ("mlp.shared_experts.linear_fc1", "gated", "gated"),
        "mlp.shared_experts.linear_fc2": ("mlp.shared_experts.linear_fc2", "row", "replicated"),
        "mlp.linear1": ("mlp.linear_fc1", "gated", "gated"),
        "mlp.linear2": ("mlp.linear_fc2", "row", "replicated"),
    }
)
"""Stored name, canonical name, sharing of the weight, sharing of the bias."""

_REPLICATED: Mapping[str, str] = MappingProxyType(
    {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "pre_mlp_layernorm",
        "post_inter_attention_layernorm": "pre_mlp_layernorm",
        "pre_mlp_layernorm": "pre_mlp_layernorm",
        "self_attention.q_layernorm": "self_attention.q_layernorm",
        "self_attention.k_layernorm": "self_attention.k_layernorm",
        "mlp.deepspeed_moe.gate.wg": "mlp.router",
        "mlp.router": "mlp.router",
        "mlp.coefficient": "mlp.coefficient",
    }
)
_FUSED_NORMS: Mapping[str, str] = MappingProxyType(
    {
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    }
)
"""Transformer Engine keeps a norm inside the linear behind it."""
_FPDT: Mapping[str, Named] = MappingProxyType(
    {
        "self_attention.qkv_linear_weight": Named(
            "self_attention.linear_qkv.weight", "qkv", "thirds"
        ),
        "self_attention.qkv_linear_bias": Named("self_attention.linear_qkv.bias", "qkv", "thirds"),
        "self_attention.qkv_dense_weight": Named("self_attention.linear_proj.weight", "row"),
        "self_attention.qkv_dense_bias": Named("self_attention.linear_proj.bias", "replicated"),
    }
)
_EXPERT = re.compile(
    r"mlp\.deepspeed_moe\.experts\.deepspeed_experts\.(\d+)\.(dense_h_to_4h|dense_4h_to_h)\.(\w+)"
)
_EMBEDDING: Mapping[str, Named] = MappingProxyType(
    {
        "word_embeddings.weight": Named("embedding.word_embeddings.weight", "vocab"),
        "position_embeddings.weight": Named("embedding.position_embeddings.weight", "replicated"),
        "position_embeddings.local_embeddings.weight": Named(
            "embedding.position_embeddings.weight", "column"
        ),
        "tokentype_embeddings.weight": Named("embedding.tokentype_embeddings.weight", "replicated"),
        "word_embeddings.norm.weight": Named("embedding.layernorm.weight", "replicated"),
        "word_embeddings.norm.bias": Named("embedding.layernorm.bias", "replicated"),
    }
)
_HEADS: Mapping[str, Named] = MappingProxyType(
    {
        "output_layer.weight": Named("output_layer.weight", "vocab"),
        "lm_head.weight": Named("output_layer.weight", "vocab"),
        "final_linear.weight": Named("output_layer.weight", "vocab"),
        "lm_head.bias": Named("output_layer.bias", "vocab"),
        "lm_head.dense.weight": Named("lm_head.dense.weight", "replicated"),
        "lm_head.dense.bias": Named("lm_head.dense.bias", "replicated"),
        "lm_head.layernorm.weight": Named("lm_head.layer_norm.weight", "replicated"),
        "lm_head.layernorm.bias": Named("lm_head.layer_norm.bias", "replicated"),
        "binary_head.weight": Named("binary_head.weight", "replicated"),
        "binary_head.bias": Named("binary_head.bias", "replicated"),
        "pooler.dense.weight": Named("pooler.dense.weight", "replicated"),
        "pooler.dense.bias": Named("pooler.dense.bias", "replicated"),
    }
)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dictionaries with their joined names, in order."""
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from flatten(value, name)
        else:
            yield name, value


@lru_cache(maxsize=4096)
def block_name(suffix: str, *, has_cross_attention: bool = False) -> Named | None:
    """The canonical rest of a name inside a transformer block; None if it is unknown."""
    suffix = re.sub(r"^attention\.", "self_attention.", suffix)
    if suffix in _FPDT:
        return _FPDT[suffix]
    for fused, norm in _FUSED_NORMS.items():
        if suffix.startswith(fused):
            return Named(norm + suffix.removeprefix(fused), "replicated")
    if (expert := _EXPERT.fullmatch(suffix)) is not None:
        return _expert_name(*expert.groups())
    module, _, part = suffix.rpartition(".")
    part = "weight" if part == "scale" else part
    if has_cross_attention and module == "post_attention_layernorm":
        return Named(f"pre_cross_attn_layernorm.{part}", "replicated")
    if module in _REPLICATED:
        return Named(f"{_REPLICATED[module]}.{part}", "replicated")
    if module in _LINEARS and part in ("weight", "bias"):
        name, weight, bias = _LINEARS[module]
        return Named(f"{name}.{part}", weight if part == "weight" else bias)
    return None


def _expert_name(number: str, linear: str, part: str) -> Named:
    inner = block_name(f"mlp.{linear}.{part}")
    assert inner is not None
    return Named(
        f"mlp.experts.local_experts.{number}.{inner.name.removeprefix('mlp.')}", inner.sharing
    )


_FINAL = re.compile(r"(encoder|decoder|transformer)\.final_layernorm\.(\w+)")
_LAYER = re.compile(r"(encoder|decoder|transformer)\.layers\.(\d+)\.(.+)")


def canonical_name(
    stored: str, *, stack: str = "decoder", first_layer: int = 0, has_cross_attention: bool = False
) -> Named | None:
    """The canonical name of a parameter of a model without pipeline; None if it is unknown.

    Args:
        stored: Name in the file, with or without ``language_model.``.
        stack: What the ``encoder`` of the file is called: ``decoder`` in a GPT.
        first_layer: Number of the stage's first layer.
        has_cross_attention: Whether the file's decoder attends to an encoder (T5).
    """
    name = stored.removeprefix("module.").removeprefix("language_model.")
    if (layer := _LAYER.fullmatch(name)) is not None:
        kind, number, suffix = layer.groups()
        is_decoder = kind == "decoder"
        inner = block_name(suffix, has_cross_attention=is_decoder and has_cross_attention)
        where = "decoder" if is_decoder else stack
        if inner is None:
            return None
        return replace(inner, name=f"{where}.layers.{int(number) + first_layer}.{inner.name}")
    if (final := _FINAL.fullmatch(name)) is not None:
        where = "decoder" if final[1] == "decoder" else stack
        return Named(f"{where}.final_layernorm.{final[2]}", "replicated")
    return module_name(name)


def module_name(name: str) -> Named | None:
    """The canonical name of a parameter outside the blocks."""
    return _EMBEDDING.get(name.removeprefix("embedding.")) or _HEADS.get(name)


_STORED: Mapping[str, tuple[str, Sharing, Sharing]] = MappingProxyType(
    {
        "self_attention.linear_qkv": ("self_attention.query_key_value", "qkv", "qkv"),
        "self_attention.linear_proj": ("self_attention.dense", "row", "replicated"),
        "cross_attention.linear_q": ("inter_attention.query", "column", "column"),
        "cross_attention.linear_kv": ("inter_attention.key_value", "column", "column"),
        "cross_attention.linear_proj": ("inter_attention.dense", "row", "replicated"),
        "mlp.linear_fc1": ("mlp.dense_h_to_4h", "gated", "gated"),
        "mlp.linear_fc2": ("mlp.dense_4h_to_h", "row", "replicated"),
        "mlp.router": ("mlp.deepspeed_moe.gate.wg", "replicated", "replicated"),
        "mlp.shared_experts.linear_fc1": ("mlp.mlp.dense_h_to_4h", "gated", "gated"),
        "mlp.shared_experts.linear_fc2": ("mlp.mlp.dense_4h_to_h", "row", "replicated"),
        "mlp.coefficient": ("mlp.coefficient", "replicated", "replicated"),
        "input_layernorm": ("input_layernorm", "replicated", "replicated"),
        "pre_mlp_layernorm": ("post_attention_layernorm", "replicated", "replicated"),
        "pre_cross_attn_layernorm": ("post_attention_layernorm", "replicated", "replicated"),
    }
)


_EXPERTS = "mlp.deepspeed_moe.experts.deepspeed_experts"
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.\w+)")
_OWNED_EXPERT = re.compile(r"(.+\.mlp\.experts\.local_experts\.)(\d+)(\..+)")


def expert_of(name: str) -> int | None:
    """The expert that a parameter's canonical name is of; None outside experts."""
    found = _OWNED_EXPERT.fullmatch(name)
    return None if found is None else int(found[2])


def with_expert(name: str, number: int) -> str:
    """The canonical name of the same parameter of expert ``number``."""
    return _OWNED_EXPERT.sub(rf"\g<1>{number}\g<3>", name)


def stored_block_name(rest: str, *, has_cross_attention: bool = False) -> tuple[str, Named] | None:
    """How Megatron calls a parameter inside a block, and how ranks share it; None if it can't."""
    if (expert := _LOCAL_EXPERT.fullmatch(rest)) is not None:
        inner = stored_block_name(f"mlp.{expert[2]}")
        if inner is None:
            return None
        key = inner[0].removeprefix("mlp.")
        return f"{_EXPERTS}.{expert[1]}.{key}", Named(rest, inner[1].sharing)
    module, _, part = rest.rpartition(".")
    if module not in _STORED or part not in ("weight", "bias"):
        return None
    stored, weight, bias = _STORED[module]
    if has_cross_attention and module == "pre_mlp_layernorm":
        stored = "post_inter_attention_layernorm"
    return f"{stored}.{part}", Named(rest, weight if part == "weight" else bias)


def stored_module_name(name: str) -> tuple[str, Named] | None:
    """How Megatron calls a parameter outside the blocks, below ``language_model`` where it is."""
    for stored, named in _EMBEDDING.items():
        if named.name == name and named.sharing != "column":
            return f"language_model.embedding.{stored}", named
    for stored, named in _HEADS.items():
        is_inner = stored.startswith(("output_layer", "pooler"))
        if named.name == name and not stored.startswith(("lm_head.weight", "final_linear")):
            return (f"language_model.{stored}" if is_inner else stored), named
    return None


_STACKS = ("encoder", "decoder")
_AFTER = ("pooler", "output_layer", "lm_head", "binary_head")
_IN_BLOCK = (
    "input_layernorm",
    "self_attention",
    "pre_cross_attn_layernorm",
    "cross_attention",
    "pre_mlp_layernorm",
    "mlp",
)


def megatron_order(name: str) -> tuple[int, ...]:
    """A sort key: the order in which Megatron's modules register their parameters."""
    parts = name.split(".")
    is_bias = int(parts[-1] == "bias")
    if parts[0] == "embedding":
        tables = ("word_embeddings", "position_embeddings", "tokentype_embeddings")
        return 0, tables.index(parts[1]) if parts[1] in tables else len(tables), is_bias
    if parts[0] in _STACKS:
        stack = 1 + _STACKS.index(parts[0])
        if parts[1] != "layers":
            return stack, 1 << 30, is_bias
        place = _IN_BLOCK.index(parts[3]) if parts[3] in _IN_BLOCK else len(_IN_BLOCK)
        module = ".".join(parts[3:-1])
        if (expert := expert_of(name)) is not None:
            # DeepSpeed registers the router, then its experts, then what stands beside them.
            router = list(_STORED).index("mlp.router")
            return stack, int(parts[2]), place, router, 1 + expert, int(parts[7][-1]), is_bias
        inner = list(_STORED).index(module) if module in _STORED else len(_STORED)
        return stack, int(parts[2]), place, inner, 0, 0, is_bias
    after = _AFTER.index(parts[0]) if parts[0] in _AFTER else len(_AFTER)
    # A BERT head registers its own bias before its dense layer; output_layer.bias is that bias.
    first = parts[0] == "output_layer" and is_bias
    return 3, _AFTER.index("lm_head") if first else after, 0 if first else 1, is_bias
