"""What the stored arguments of Megatron's training scripts say of the model and the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mds_ckpt.megatron.expert_args import expert_config
from mds_ckpt.pickles.records import EnumRecord, NumpyArray, Opaque, TensorRef, TorchDtype
from mds_ckpt.tensors.qkv import Heads

__all__ = ["heads_of", "is_gated", "model_config", "plain", "weight_dtype"]


def _positive(args: Mapping[str, Any], key: str) -> int | None:
    value = args.get(key)
    return value if type(value) is int and value > 0 else None


def heads_of(args: Mapping[str, Any]) -> Heads | None:
    """The attention heads; None if the arguments do not say."""
    queries, hidden = _positive(args, "num_attention_heads"), _positive(args, "hidden_size")
    channels = _positive(args, "kv_channels")
    if channels is None and queries and hidden and hidden % queries == 0:
        channels = hidden // queries
    if queries is None or channels is None:
        return None
    return Heads(queries, _groups(args, queries), channels)


def _groups(args: Mapping[str, Any], queries: int) -> int:
    """Key/value heads: MDS's name, or Megatron-LM's pair of options."""
    if args.get("group_query_attention") is True:
        return _positive(args, "num_query_groups") or queries
    return _positive(args, "num_key_value_heads") or queries


def is_gated(args: Mapping[str, Any]) -> bool:
    """Whether the MLP's first linear holds a gate and an up projection."""
    return args.get("swiglu") is True


def weight_dtype(args: Mapping[str, Any]) -> str:
    """The number type that the run computed in, by safetensors' name."""
    dtype = args.get("params_dtype")
    name = dtype.name if isinstance(dtype, TorchDtype) else str(dtype)
    known = {"bfloat16": "BF16", "float16": "F16", "half": "F16"}
    if name in known:
        return known[name]
    if args.get("bf16") is True:
        return "BF16"
    return "F16" if args.get("fp16") is True else "F32"


def _activation(args: Mapping[str, Any]) -> str:
    if args.get("swiglu") is True:
        return "swiglu"
    if args.get("squared_relu") is True:
        return "relu2"
    if args.get("openai_gelu") is True or args.get("onnx_safe") is True:
        return "gelu_tanh" if args.get("openai_gelu") is True else "gelu"
    # The fused bias-gelu kernel, which is the default, computes the tanh form.
    return "gelu_tanh" if args.get("bias_gelu_fusion") is True else "gelu"


_POSITION_ENUM = {1: "rope", 2: "learned", 3: "alibi"}
"""BigScience's ``PositionEmbeddingType``."""


def _position(args: Mapping[str, Any]) -> str:
    kind = args.get("position_embedding_type")
    if isinstance(kind, EnumRecord) and str(kind.cls).endswith("PositionEmbeddingType"):
        kind = _POSITION_ENUM.get(kind.value) if type(kind.value) is int else None
    if kind == "alibi":
        return "alibi"
    if args.get("use_rotary_position_embeddings") is True or kind == "rope":
        return "rope"
    if args.get("add_position_embedding") is False or kind == "none":
        return "none"
    return "learned"


def model_config(args: Mapping[str, Any], *, vocab_size: int | None) -> dict[str, Any]:
    """The model's configuration, by the field names of ``mds_core.config.GPTConfig``."""
    heads, hidden = heads_of(args), _positive(args, "hidden_size")
    has_bias = args.get("add_bias_linear", not args.get("disable_bias_linear", False)) is True
    config: dict[str, Any] = {
        "num_layers": _positive(args, "num_layers") or _positive(args, "encoder_num_layers"),
        "hidden_size": hidden,
        "num_attention_heads": _positive(args, "num_attention_heads"),
        "ffn_hidden_size": _positive(args, "ffn_hidden_size"),
        "vocab_size": vocab_size,
        "max_position_embeddings": _positive(args, "max_position_embeddings")
        or _positive(args, "seq_length"),
        "make_vocab_size_divisible_by": _positive(args, "make_vocab_size_divisible_by"),
        "position_embedding": _position(args),
        "activation": _activation(args),
        "normalization": str(args.get("normalization") or "layernorm").lower(),
        "norm_epsilon": _number(args, "layernorm_epsilon"),
        "zero_centered_norm": args.get("apply_layernorm_1p") is True,
        "add_bias": has_bias,
        "tie_embeddings": args.get("untie_embeddings_and_output_weights") is not True,
        "hidden_dropout": _number(args, "hidden_dropout"),
        "attention_dropout": _number(args, "attention_dropout"),
        "init_std": _number(args, "init_method_std"),
    }
    if heads is not None and heads.groups != heads.queries:
        config["num_key_value_heads"] = heads.groups
    if heads is not None and hidden != heads.queries * heads.channels:
        config["head_dim"] = heads.channels
    if config["position_embedding"] == "rope":
        config["rope_theta"] = _number(args, "rope_theta") or _number(args, "rotary_base")
        config["rope_percent"] = _number(args, "rotary_percent")
    config |= expert_config(args)
    if args.get("apply_residual_connection_post_layernorm") is True:
        config["residual_post_layernorm"] = True
    return {name: value for name, value in config.items() if value is not None}


def _number(args: Mapping[str, Any], key: str) -> float | None:
    value = args.get(key)
    return float(value) if isinstance(value, int | float) and value is not True else None


def plain(value: Any) -> Any:
    """``value`` as JSON has it; records become their names, tensors and arrays are left out."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items() if _is_small(item)}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value if _is_small(item)]
    if isinstance(value, TorchDtype | EnumRecord):
        return str(value)
    return str(value.cls) if isinstance(value, Opaque) else f"<{type(value).__name__}>"


def _is_small(value: Any) -> bool:
    return not isinstance(value, TensorRef | NumpyArray | bytes)
