"""The model of a Megatron-core checkpoint: from stored arguments, its tensors, and the user.

Without stored arguments, tensors give sizes but not the number of heads or the activation. Those
are asked for, when somebody needs them, with the words that answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mds_ckpt.checkpoint import LazyTensor
from mds_ckpt.errors import RejectedError, UsageError
from mds_ckpt.formats.torch_dist.arguments import refuse_unknown_settings, stored_config
from mds_ckpt.formats.torch_dist.experts import measured_experts, stored_router

__all__ = ["describe"]

_WORDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "activation": ("gelu", "gelu_tanh", "swiglu", "geglu", "relu", "relu2", "silu"),
        "position_embedding": ("learned", "rope", "none"),
    }
)
_POSITIONS = "embedding.position_embeddings.weight"


def describe(
    weights: Mapping[str, LazyTensor],
    *,
    family: str,
    args: Mapping[str, Any],
    said: Mapping[str, Any],
    path: Path,
    is_needed: bool,
) -> tuple[dict[str, Any], list[str]]:
    """The configuration of a GPT or BERT, and sentences about what was assumed or is unknown.

    Args:
        weights: The weights by canonical name.
        family: ``gpt`` or ``bert``.
        args: Stored arguments of the training script; may be empty.
        said: What the user says, by the configuration's field names.
        path: The checkpoint, for messages.
        is_needed: Whether a model is to be built from it, so that a gap is an error.

    Raises:
        RejectedError: What was said does not fit the tensors, or something is missing.
        UsageError: What was said makes no sense.
    """
    stack = "encoder" if family == "bert" else "decoder"
    if is_needed:
        refuse_unknown_settings(args, path)
    facts = _known(weights, stack, args, path) | _checked(said)
    notes = []
    if "norm_epsilon" not in facts:
        facts["norm_epsilon"] = 1e-5
        notes.append("norm_epsilon is not stored; 1e-5, Megatron's default, is taken")
    heads = facts.get("num_attention_heads")
    if heads is not None:
        hidden = facts["hidden_size"]
        facts |= _heads(weights, heads, hidden, f"{stack}.layers.0.", path)
    missing = [name for name in _needed(facts) if facts.get(name) is None]
    if missing:
        reason = f"neither its tensors nor stored arguments say {', '.join(missing)}"
        listed = ",".join(f"{name}=VALUE" for name in missing)
        remedy = f"say it with --from torch_dist:{listed}"
        if is_needed:
            raise RejectedError(path, reason, remedy=remedy)
        notes.append(f"{reason}; {remedy}")
    return facts, notes


def _known(
    weights: Mapping[str, LazyTensor], stack: str, args: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    """What stored arguments and tensors say; the tensors know better."""
    rows = weights["embedding.word_embeddings.weight"].shape[0]
    facts = stored_config(args, vocab_size=rows) | _measured(weights, stack, path)
    if experts := measured_experts(weights):
        facts |= experts | stored_router(args)
    return facts | (_bert(weights) if stack == "encoder" else {})


def _needed(facts: Mapping[str, Any]) -> list[str]:
    """Facts without which there is no model."""
    needed = ["num_attention_heads", "activation", "position_embedding", "max_position_embeddings"]
    if facts.get("position_embedding") == "rope":
        needed.append("rope_theta")
    if facts.get("moe_ffn_hidden_size"):
        needed.append("moe_topk")
    return needed


def _checked(said: Mapping[str, Any]) -> dict[str, Any]:
    """What the user says; UsageError for values that make no sense."""
    for name, value in said.items():
        if name in _WORDS:
            is_right = value in _WORDS[name]
        elif name in ("num_attention_heads", "max_position_embeddings", "moe_topk"):
            is_right = type(value) is int and 1 <= value < 1 << 31
        else:
            is_right = type(value) in (int, float) and 0 < value < math.inf
        if not is_right:
            due = f"one of {', '.join(_WORDS[name])}" if name in _WORDS else "a number above 0"
            raise UsageError(f"{name}={value} makes no sense; give {due}")
    return dict(said)


def _matrix(weights: Mapping[str, LazyTensor], name: str, path: Path) -> tuple[int, int] | None:
    """Rows and columns of a weight; None if there is none of this name."""
    if name not in weights:
        return None
    shape = weights[name].shape
    if len(shape) != 2:
        remedy = "copy the checkpoint again from its source"
        raise RejectedError(path, f"its shape is {list(shape)}", remedy=remedy, tensor=name)
    return shape[0], shape[1]


def _bert(weights: Mapping[str, LazyTensor]) -> dict[str, Any]:
    """Which parts a BERT has around its layers."""
    types = weights.get("embedding.tokentype_embeddings.weight")
    return {
        "num_token_types": 0 if types is None or not types.shape else types.shape[0],
        "word_head": "output_layer.bias" in weights,
        "pooler": "pooler.dense.weight" in weights,
        "binary_head": "binary_head.weight" in weights,
    }


def _measured(weights: Mapping[str, LazyTensor], stack: str, path: Path) -> dict[str, Any]:
    """What the tensors say."""
    words = weights["embedding.word_embeddings.weight"].shape
    layers = {name.split(".")[2] for name in weights if name.startswith(f"{stack}.layers.")}
    is_tied = "output_layer.weight" not in weights
    first = f"{stack}.layers.0."
    has_bias = f"{first}self_attention.linear_proj.bias" in weights
    facts: dict[str, Any] = {
        "num_layers": len(layers),
        "hidden_size": words[1],
        "vocab_size": words[0],
        "tie_embeddings": is_tied,
        "add_bias": has_bias,
        "normalization": "layernorm" if f"{first}input_layernorm.bias" in weights else "rmsnorm",
    }
    if (f"{first}self_attention.linear_qkv.bias" in weights) != has_bias:
        facts["add_qkv_bias"] = not has_bias
    if f"{first}self_attention.q_layernorm.weight" in weights:
        facts["qk_norm"] = True
    dense = [name for name in weights if name.endswith(".mlp.linear_fc2.weight")]
    if dense and (out := _matrix(weights, dense[0], path)) is not None:
        facts["ffn_hidden_size"] = out[1]
    if (table := _matrix(weights, _POSITIONS, path)) is not None:
        facts |= {"position_embedding": "learned", "max_position_embeddings": table[0]}
    return facts


def _heads(
    weights: Mapping[str, LazyTensor], heads: Any, hidden: int, first: str, path: Path
) -> dict[str, Any]:
    """Key/value heads and head size, as the first layer's attention has them."""
    rows = _matrix(weights, f"{first}self_attention.linear_qkv.weight", path)
    inner = _matrix(weights, f"{first}self_attention.linear_proj.weight", path)
    if rows is None or inner is None:
        return {}
    channels, left = divmod(inner[1], heads) if type(heads) is int and heads > 0 else (0, 1)
    groups, odd = divmod(rows[0] - inner[1], 2 * channels) if channels else (0, 1)
    if left or odd or groups < 1 or heads % groups:
        raise RejectedError(
            path,
            f"{heads} attention heads do not fit query, key and value of {rows[0]} rows",
            remedy="say the right number with --from torch_dist:num_attention_heads=N",
        )
    facts: dict[str, Any] = {"num_key_value_heads": groups} if groups != heads else {}
    if channels * heads != hidden:
        facts["head_dim"] = channels
    return facts
