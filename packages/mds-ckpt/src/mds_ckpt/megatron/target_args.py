"""The arguments and counters that a Megatron checkpoint of ours carries, as its code has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.errors import UnsupportedError
from mds_ckpt.megatron.expert_args import expert_args, expert_fault
from mds_ckpt.megatron.target_layout import TargetLayout
from mds_ckpt.pickles.records import EnumRecord, Global, Namespace, TorchDtype
from mds_ckpt.tensors.qkv import Layout

__all__ = [
    "Progress",
    "check_expressible",
    "plain_args",
    "qkv_layout_of",
    "source_args",
    "stored_args",
]

_THIRDS_MARKER = "ds_sequence_parallel_fpdt"
_TORCH_NAMES: Mapping[str, str] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class Progress:
    """How far training was, as the target states it.

    Args:
        checkpoint: The source.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        counters = checkpoint.counters
        self.iteration = counters.get("iteration", 0)
        self.samples = counters.get("consumed_samples", 0)
        self.tokens = counters.get("consumed_tokens", 0)
        self.skipped = counters.get("skipped_steps", 0)


def check_expressible(checkpoint: Checkpoint, experts: Mapping[str, int]) -> None:
    """Raise UnsupportedError for a model that Megatron-DeepSpeed's code has no words for.

    Args:
        checkpoint: The source.
        experts: The number of experts of each layer that has some, by the layer's name.
    """
    config = checkpoint.config
    faults = {
        "it normalises query and key heads": bool(config.get("qk_norm")),
        "it has a sliding window": config.get("sliding_window") is not None,
        "only query, key and value have biases": config.get("add_qkv_bias")
        not in (None, config.get("add_bias", True)),
        f"its activation is {config.get('activation')}": config.get("activation", "gelu")
        not in ("gelu", "gelu_tanh", "relu2", "swiglu"),
        "its rotary frequencies are scaled": bool(
            config.get("rope_scaling") or config.get("rope_scaling_type")
        ),
        "its layers add attention and MLP side by side": bool(config.get("parallel_residual")),
        "it has ALiBi": config.get("position_embedding") == "alibi",
        "it normalises the token vectors": bool(config.get("embedding_norm")),
        f"it is a model of family {checkpoint.model.family}": checkpoint.model.family
        not in ("gpt", "bert", "t5"),
    }
    if (fault := expert_fault(config, experts)) is not None:
        faults[fault] = True
    for reason, is_so in faults.items():
        if is_so:
            raise UnsupportedError(
                checkpoint.path,
                f"{reason}, which Megatron-DeepSpeed can't express",
                remedy="convert it to hf or mds",
            )


def source_args(checkpoint: Checkpoint) -> dict[str, Any]:
    """The arguments that the source was stored with, if its format has them."""
    megatron = checkpoint.origin.get("megatron") or {}
    args = megatron.get("args") if isinstance(megatron, Mapping) else None
    return dict(args) if isinstance(args, Mapping) else {}


def qkv_layout_of(checkpoint: Checkpoint) -> Layout:
    """The row order that the source's own code understands: newer code cuts thirds."""
    args = source_args(checkpoint)
    is_gqa = checkpoint.config.get("num_key_value_heads") not in (
        None,
        checkpoint.config.get("num_attention_heads"),
    )
    return "thirds" if _THIRDS_MARKER in args and not is_gqa else "grouped"


def _family_args(checkpoint: Checkpoint) -> dict[str, Any]:
    """What only some models have."""
    config = checkpoint.config
    args: dict[str, Any] = {}
    if "residual_post_layernorm" in config:
        args["apply_residual_connection_post_layernorm"] = bool(config["residual_post_layernorm"])
    if checkpoint.model.family == "bert":
        args["bert_binary_head"] = bool(config.get("pooler", config.get("binary_head", True)))
    if checkpoint.model.family == "t5":
        args["decoder_num_layers"] = config.get("decoder_num_layers") or config["num_layers"]
    return args


def _model_args(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.config
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    activation = config.get("activation", "gelu")
    position = config.get("position_embedding", "learned")
    width = config.get("ffn_hidden_size")
    if width is None:
        width = 8 * hidden // 3 // 64 * 64 if "glu" in activation else 4 * hidden
    return {
        **_family_args(checkpoint),
        "num_layers": config["num_layers"],
        "encoder_num_layers": config["num_layers"],
        "hidden_size": hidden,
        "ffn_hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "kv_channels": config.get("head_dim") or hidden // heads,
        "max_position_embeddings": config["max_position_embeddings"],
        "add_position_embedding": position == "learned",
        "use_rotary_position_embeddings": position == "rope",
        "rope_theta": config.get("rope_theta", 10000.0),
        "rotary_percent": config.get("rope_percent", 1.0),
        "add_bias_linear": bool(config.get("add_bias", True)),
        "swiglu": activation == "swiglu",
        "squared_relu": activation == "relu2",
        "openai_gelu": activation == "gelu_tanh" and not config.get("_fused"),
        "bias_gelu_fusion": False,
        "untie_embeddings_and_output_weights": not checkpoint.model.tied_embeddings,
        "normalization": config.get("normalization", "layernorm"),
        "layernorm_epsilon": config.get("norm_epsilon", 1e-5),
        "apply_layernorm_1p": bool(config.get("zero_centered_norm", False)),
        "hidden_dropout": config.get("hidden_dropout", 0.0),
        "attention_dropout": config.get("attention_dropout", 0.0),
        "init_method_std": config.get("init_std", 0.02),
    }


def stored_args(
    checkpoint: Checkpoint,
    layout: TargetLayout,
    progress: Progress,
    *,
    padded_rows: int,
    dtype: str,
    qkv: Layout,
    experts: Mapping[str, int],
) -> Namespace:
    """The argument namespace: the source's own where it has one, with what changes put right."""
    args = plain_args(source_args(checkpoint))
    model = _model_args(checkpoint)
    if args.get("bias_gelu_fusion") is True and model["openai_gelu"]:
        # The fused kernel is the tanh form; what computed it before computes it again.
        model |= {"bias_gelu_fusion": True, "openai_gelu": False}
    args |= model | expert_args(checkpoint.config, experts, ep_size=layout.ep_size)
    args.setdefault("seq_length", args["max_position_embeddings"])
    args.setdefault("encoder_seq_length", args["seq_length"])
    if qkv == "grouped":
        args.pop(_THIRDS_MARKER, None)
    return Namespace(
        args
        | {
            "mds_qkv_layout": qkv,
            "padded_vocab_size": padded_rows,
            "make_vocab_size_divisible_by": args.get("make_vocab_size_divisible_by")
            or math.gcd(padded_rows // layout.tp_size, 128),
            "tensor_model_parallel_size": layout.tp_size,
            "pipeline_model_parallel_size": layout.pp_size,
            "transformer_pipeline_model_parallel_size": layout.pp_size,
            "virtual_pipeline_model_parallel_size": layout.vp_size if layout.vp_size > 1 else None,
            "num_layers_per_virtual_pipeline_stage": _chunk_layers(checkpoint, layout),
            "data_parallel_size": layout.dp_size,
            "world_size": layout.tp_size * layout.pp_size * layout.dp_size,
            "params_dtype": TorchDtype(_TORCH_NAMES[dtype]),
            "bf16": dtype == "BF16",
            "fp16": dtype == "F16",
            "iteration": progress.iteration,
            "consumed_train_samples": progress.samples,
            "consumed_valid_samples": 0,
            "consumed_train_tokens": progress.tokens,
            "model_type": EnumRecord(Global("megatron.core.enums", "ModelType"), 1),
        }
    )


def _chunk_layers(checkpoint: Checkpoint, layout: TargetLayout) -> int | None:
    """Layers of each model chunk, where stages have several."""
    count: int = checkpoint.config["num_layers"]
    return count // (layout.pp_size * layout.vp_size) if layout.vp_size > 1 else None


def plain_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Stored arguments that are values, without those whose objects were not kept."""
    return {key: value for key, value in args.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    """Whether a stored argument is a value and not the name of an object that was not kept."""
    return not (isinstance(value, str) and value.startswith(("<", "torch.", "megatron.")))
