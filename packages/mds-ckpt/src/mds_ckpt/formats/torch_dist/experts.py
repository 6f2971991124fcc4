"""The experts of a Megatron-core model: from its tensors, and its router from stored arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mds_ckpt.checkpoint import LazyTensor

__all__ = ["measured_experts", "stored_router"]

_EXPERT = re.compile(r"decoder\.layers\.(\d+)\.mlp\.experts\.local_experts\.(\d+)\..+")
_SHARED = re.compile(r"decoder\.layers\.\d+\.mlp\.shared_experts\.linear_fc2\.weight")
_POLICIES: Mapping[str, str] = {"probs": "probability", "position": "position"}


def measured_experts(weights: Mapping[str, LazyTensor]) -> dict[str, Any]:
    """What the tensors say of experts; empty for a model without them."""
    counts: dict[int, int] = {}
    width = 0
    for name, tensor in weights.items():
        if (match := _EXPERT.fullmatch(name)) is not None:
            layer, number = int(match[1]), int(match[2])
            counts[layer] = max(counts.get(layer, 0), number + 1)
            if name.endswith(".linear_fc2.weight") and len(tensor.shape) == 2:
                width = tensor.shape[1]
    if not counts:
        return {}
    layers = 1 + max(int(n.split(".")[2]) for n in weights if n.startswith("decoder.layers."))
    per_layer = [counts.get(layer, 0) for layer in range(layers)]
    interval, count = min(counts) + 1, max(per_layer)
    regular = [0 if (layer + 1) % interval else count for layer in range(layers)]
    facts: dict[str, Any] = {"layer_experts": per_layer}
    if per_layer == regular:
        facts = {"num_experts": count, "expert_interval": interval}
    facts["moe_ffn_hidden_size"] = width
    shared = [tensor for name, tensor in weights.items() if _SHARED.fullmatch(name)]
    if shared and len(shared[0].shape) == 2:
        facts["moe_shared_hidden_size"] = shared[0].shape[1]
    if not any(name.endswith(".mlp.linear_fc2.weight") for name in weights):
        facts["ffn_hidden_size"] = width
    return facts


def stored_router(args: Mapping[str, Any]) -> dict[str, Any]:
    """What the arguments say of the choice of experts."""
    facts: dict[str, Any] = {"moe_residual": False}
    topk, factor = args.get("moe_router_topk"), args.get("moe_expert_capacity_factor")
    if type(topk) is int:
        facts["moe_topk"] = topk
    # Scores are turned into shares over the chosen experts, unless that was done over all before.
    facts["moe_normalize_gates"] = args.get("moe_router_pre_softmax") is not True
    if isinstance(factor, int | float) and factor is not True:
        facts |= {"moe_capacity_factor": float(factor), "moe_eval_capacity_factor": float(factor)}
        facts |= {"moe_min_capacity": 1}
        facts["moe_drop_policy"] = _POLICIES.get(str(args.get("moe_token_drop_policy")), "position")
    if isinstance(args.get("moe_aux_loss_coeff"), int | float):
        facts["moe_loss_coeff"] = float(args["moe_aux_loss_coeff"])
    return facts
