"""A model's experts: are all there, and what do Megatron-DeepSpeed's arguments say of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mds_ckpt.checkpoint import LazyTensor
from mds_ckpt.megatron.naming import expert_of

__all__ = ["expert_args", "expert_config", "expert_fault", "missing_experts"]


def missing_experts(weights: Mapping[str, LazyTensor]) -> tuple[str, str] | None:
    """A router without some of its experts, and how many are there; None if all are.

    A router has a row for each expert of its layer.
    """
    found: dict[str, set[int]] = {}
    for name in weights:
        if (number := expert_of(name)) is not None:
            found.setdefault(name.split(".experts.")[0], set()).add(number)
    for mlp, numbers in found.items():
        router = weights.get(f"{mlp}.router.weight")
        rows = router.shape[0] if router is not None and router.shape else 0
        if router is not None and (len(numbers), max(numbers)) != (rows, rows - 1):
            return router.name, f"{mlp} has {len(numbers)} of {rows} experts"
    return None


def expert_config(args: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration's fields of the experts; empty for a model without them."""
    stored = args.get("num_experts")
    counts = [stored] if type(stored) is int else stored
    layers, interval = args.get("num_layers"), args.get("expert_interval", 1)
    if not isinstance(counts, list | tuple) or not all(type(count) is int for count in counts):
        return {}
    if type(interval) is not int or type(layers) is not int or max(counts, default=1) <= 1:
        return {}
    config: dict[str, Any] = {"num_experts": counts[0], "expert_interval": interval}
    if len(counts) > 1:
        # One number for each layer with experts, which are every interval-th.
        per_layer = [
            counts[min(layer // interval, len(counts) - 1)] if (layer + 1) % interval == 0 else 0
            for layer in range(layers)
        ]
        config = {"layer_experts": per_layer}
    topk = args.get("topk", 1)
    config |= {
        "moe_topk": topk if type(topk) is int else 1,
        "moe_residual": args.get("mlp_type") == "residual",
        "moe_min_capacity": args.get("moe_min_capacity", 4),
        "moe_loss_coeff": args.get("moe_loss_coeff", 0.1),
        "moe_balance_scope": "micro_batch",
        "moe_balance_choices": "first",
    }
    if args.get("moe_token_dropping", True) is not False:
        config["moe_capacity_factor"] = args.get("moe_train_capacity_factor", 1.0)
        config["moe_eval_capacity_factor"] = args.get("moe_eval_capacity_factor", 1.0)
    return config


def expert_args(
    config: Mapping[str, Any], experts: Mapping[str, int], *, ep_size: int
) -> dict[str, Any]:
    """The arguments for a model's experts; those of a model without any where there are none.

    Args:
        config: The model's configuration.
        experts: The number of experts of each layer that has some, by the layer's name.
        ep_size: Ranks that share the experts out.
    """
    if not experts:
        return {"num_experts": [1], "moe_expert_parallel_size": 1}
    numbers = [int(layer.rsplit(".", 1)[1]) for layer in experts]
    counts = list(experts.values())
    interval = numbers[0] + 1
    factor = config.get("moe_capacity_factor")
    args: dict[str, Any] = {
        "num_experts": counts[:1] if len(set(counts)) == 1 else counts,
        "expert_interval": interval,
        "topk": config.get("moe_topk", 1),
        "mlp_type": "residual" if config.get("moe_residual") else "standard",
        "moe_expert_parallel_size": ep_size,
        "create_moe_param_group": True,
        "moe_token_dropping": factor is not None,
        "moe_min_capacity": config.get("moe_min_capacity", 4),
        "moe_loss_coeff": config.get("moe_loss_coeff", 0.01),
    }
    if factor is not None:
        args["moe_train_capacity_factor"] = factor
        args["moe_eval_capacity_factor"] = config.get("moe_eval_capacity_factor") or factor
    return args


def expert_fault(config: Mapping[str, Any], experts: Mapping[str, int]) -> str | None:
    """Why Megatron-DeepSpeed can't express a model's experts; None if it can."""
    if not experts:
        return None
    numbers = [int(layer.rsplit(".", 1)[1]) for layer in experts]
    interval = numbers[0] + 1
    total = config.get("num_layers", numbers[-1] + 1)
    if numbers != [layer for layer in range(total) if (layer + 1) % interval == 0]:
        return "its layers with experts are not every second, third or so"
    if config.get("moe_shared_hidden_size"):
        return "it adds an MLP for all tokens to its experts"
    width = config.get("moe_ffn_hidden_size")
    if width is not None and width != config.get("ffn_hidden_size"):
        return "its experts have another width than its other layers"
    if config.get("moe_topk", 1) > 2:
        return f"it sends a token to {config['moe_topk']} experts"
    return None
