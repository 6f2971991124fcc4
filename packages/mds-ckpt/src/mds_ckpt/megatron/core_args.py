"""The arguments with which Megatron-LM describes a Megatron-core model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.errors import UnsupportedError
from mds_ckpt.megatron.target_args import Progress, plain_args, source_args
from mds_ckpt.pickles.records import Namespace, TorchDtype

__all__ = ["check_core", "core_args"]

_TORCH_NAMES: Mapping[str, str] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_POSITIONS: Mapping[str, str] = {"learned": "learned_absolute", "rope": "rope", "none": "none"}


def check_core(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedError for a model that is not written as Megatron-core's."""
    config, family = checkpoint.config, checkpoint.model.family
    has_experts = any(".mlp.experts." in name for name in checkpoint.tensors)
    faults = {
        f"it is a model of family {family}": family not in ("gpt", "bert"),
        "its experts are mixed with an MLP by a learned share": bool(config.get("moe_residual")),
        "its layers have different numbers of experts": len(
            {count for count in config.get("layer_experts") or () if count}
        )
        > 1,
        "its experts have places for a part of the tokens only": has_experts
        and config.get("moe_capacity_factor") is not None,
        "its configuration does not say how many attention heads it has": not config.get(
            "num_attention_heads"
        ),
        f"its activation is {config.get('activation')}": config.get("activation", "gelu")
        not in ("gelu", "gelu_tanh", "relu2", "swiglu"),
        "its vectors of words are normalised": bool(config.get("embedding_norm")),
        "it has a sliding window": config.get("sliding_window") is not None,
        "its rotary frequencies are scaled": bool(
            config.get("rope_scaling") or config.get("rope_scaling_type")
        ),
        "its layers add attention and MLP side by side": bool(config.get("parallel_residual")),
        "it normalises behind the residual sum": bool(config.get("residual_post_layernorm")),
        f"its positions are {config.get('position_embedding')}": config.get(
            "position_embedding", "learned"
        )
        not in _POSITIONS,
    }
    for reason, is_so in faults.items():
        if is_so:
            remedy = "convert it to hf or mds"
            raise UnsupportedError(checkpoint.path, reason, remedy=remedy)


def core_args(checkpoint: Checkpoint, *, dtype: str, words: int, padded_rows: int) -> Namespace:
    """Megatron-LM's arguments; the source's own stay where they say nothing else.

    Args:
        checkpoint: The source.
        dtype: Number type of the written weights.
        words: The true vocabulary.
        padded_rows: Rows of the written one.
    """
    own = plain_args(source_args(checkpoint))
    vocabulary = {"padded_vocab_size": padded_rows, "vocab_size": words}
    return Namespace(
        {
            **own,
            **_shape_args(checkpoint, own),
            **_layer_args(checkpoint),
            **vocabulary,
            **_experts(checkpoint.config),
            **_run_args(checkpoint, dtype),
        }
    )


def _shape_args(checkpoint: Checkpoint, own: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes and positions."""
    config = checkpoint.config
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    position = config.get("position_embedding", "learned")
    positions = config.get("max_position_embeddings")
    return {
        "num_layers": config["num_layers"],
        "encoder_num_layers": config["num_layers"],
        "hidden_size": hidden,
        "ffn_hidden_size": config.get("ffn_hidden_size") or 4 * hidden,
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "kv_channels": config.get("head_dim") or hidden // heads,
        "max_position_embeddings": positions,
        "seq_length": own.get("seq_length") or positions,
        "position_embedding_type": _POSITIONS[position],
        "add_position_embedding": position == "learned",
        "use_rotary_position_embeddings": position == "rope",
        "rotary_base": int(config.get("rope_theta", 10000)),
        "rope_theta": config.get("rope_theta", 10000.0),
        "rotary_percent": config.get("rope_percent", 1.0),
    }


def _layer_args(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a layer computes, and what stands on the layers."""
    config = checkpoint.config
    activation, has_bias = config.get("activation", "gelu"), bool(config.get("add_bias", True))
    is_bert = checkpoint.model.family == "bert"
    return {
        "add_bias_linear": has_bias,
        "add_qkv_bias": bool(config.get("add_qkv_bias", has_bias)),
        "qk_layernorm": bool(config.get("qk_norm")),
        "swiglu": activation == "swiglu",
        "squared_relu": activation == "relu2",
        "openai_gelu": activation == "gelu_tanh",
        "bias_gelu_fusion": False,
        "untie_embeddings_and_output_weights": not checkpoint.model.tied_embeddings,
        "normalization": "RMSNorm" if config.get("normalization") == "rmsnorm" else "LayerNorm",
        "layernorm_epsilon": config.get("norm_epsilon", 1e-5),
        "norm_epsilon": config.get("norm_epsilon", 1e-5),
        "apply_layernorm_1p": bool(config.get("zero_centered_norm", False)),
        "init_method_std": config.get("init_std", 0.02),
        **({"bert_binary_head": bool(config.get("binary_head"))} if is_bert else {}),
    }


def _run_args(checkpoint: Checkpoint, dtype: str) -> dict[str, Any]:
    """The run that is to go on, and how it stores itself."""
    progress = Progress(checkpoint)
    return {
        "iteration": progress.iteration,
        "consumed_train_samples": progress.samples,
        "consumed_valid_samples": 0,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "bf16": dtype == "BF16",
        "fp16": dtype == "F16",
        "params_dtype": TorchDtype(_TORCH_NAMES[dtype]),
        "use_dist_ckpt": True,
        "dist_ckpt_format": "torch_dist",
        "ckpt_format": "torch_dist",
    }


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the experts; those of a model without any where there are none."""
    layers = config.get("layer_experts") or ()
    count = max(layers) if layers else config.get("num_experts")
    if not count:
        return {"num_experts": None}
    interval = config.get("expert_interval", 1)
    numbers = range(config["num_layers"])
    has_experts = [bool(n) for n in layers] or [not (n + 1) % interval for n in numbers]
    wish, topk = config.get("moe_normalize_gates"), config.get("moe_topk", 1)
    return {
        "num_experts": count,
        "moe_layer_freq": 1 if all(has_experts) else [int(has) for has in has_experts],
        "moe_router_topk": topk,
        "moe_router_pre_softmax": not (topk > 1 if wish is None else wish),
        "moe_ffn_hidden_size": config.get("moe_ffn_hidden_size")
        or config.get("ffn_hidden_size")
        or 4 * config["hidden_size"],
        "moe_shared_expert_intermediate_size": config.get("moe_shared_hidden_size"),
        "moe_aux_loss_coeff": config.get("moe_loss_coeff", 0.01),
        "moe_expert_capacity_factor": None,
    }
