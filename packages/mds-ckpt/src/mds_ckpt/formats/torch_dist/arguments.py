"""What Megatron-LM's stored arguments say of a Megatron-core model, and what of it we don't have.

A setting that changes what the model computes and that no field of ours expresses is an error: the
tensors alone would be carried over, and compute something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mds_ckpt.errors import UnsupportedError
from mds_ckpt.megatron.legacy_args import model_config

__all__ = ["refuse_unknown_settings", "stored_config"]

_COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": (None, "learned_absolute", "rope", "none"),
    "rotary_interleaved": (None, False),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "use_rope_scaling": (None, False),
    "no_rope_freq": (None,),
    "window_size": (None,),
    "attention_output_gate": (None, False),
    "multi_latent_attention": (None, False),
    "qk_l2_norm": (None, False),
    "softmax_type": (None, "vanilla"),
    "quick_geglu": (None, False),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "mtp_num_layers": (None, 0),
    "moe_router_score_function": (None, "softmax"),
    "moe_router_enable_expert_bias": (None, False),
    "moe_router_topk_scaling_factor": (None, 1, 1.0),
    "moe_router_num_groups": (None,),
    "moe_router_group_topk": (None,),
    "moe_shared_expert_gate": (None, False),
}
"""Settings that change what is computed, and the values that we have."""
_OWN_EXPERTS = ("moe_", "num_experts", "expert_interval", "layer_experts")


def stored_config(args: Mapping[str, Any], *, vocab_size: int) -> dict[str, Any]:
    """The configuration that the arguments describe, without experts; empty without arguments."""
    if not args:
        return {}
    config = model_config(args, vocab_size=vocab_size)
    # Megatron-DeepSpeed's words for experts mean nothing here.
    config = {name: v for name, v in config.items() if not name.startswith(_OWN_EXPERTS)}
    epsilon = args.get("norm_epsilon")
    if "norm_epsilon" not in config and isinstance(epsilon, int | float):
        config["norm_epsilon"] = float(epsilon)
    return config


def refuse_unknown_settings(args: Mapping[str, Any], path: Path) -> None:
    """UnsupportedError that names the first setting that our models don't have."""
    for name, known in _COMPUTED.items():
        if name in args and args[name] not in known:
            raise UnsupportedError(
                path,
                f"the stored argument '{name}' is {str(args[name])[:40]}, which our models don't "
                f"have",
                remedy="this model can't be carried over unchanged",
            )
