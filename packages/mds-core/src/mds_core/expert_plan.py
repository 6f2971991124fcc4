"""Which layers of a model choose among experts, and what these hold: arithmetic on the shape."""

from __future__ import annotations

import math
from typing import Protocol

__all__ = [
    "capacity",
    "check_experts",
    "experts_of_layers",
    "mlp_params",
    "routed_active_weights",
    "routed_params",
]


class Shape(Protocol):
    """What a model's configuration says that matters here."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def gated(self) -> bool: ...
    @property
    def add_bias(self) -> bool: ...
    @property
    def num_experts(self) -> int | None: ...
    @property
    def expert_interval(self) -> int: ...
    @property
    def layer_experts(self) -> tuple[int, ...] | None: ...
    @property
    def moe_topk(self) -> int: ...
    @property
    def moe_noise(self) -> str: ...
    @property
    def moe_sample_second(self) -> bool: ...
    @property
    def moe_residual(self) -> bool: ...
    @property
    def moe_shared_hidden_size(self) -> int | None: ...
    @property
    def expert_width(self) -> int: ...
    @property
    def shared_width(self) -> int: ...


def experts_of_layers(config: Shape) -> tuple[int, ...]:
    """Experts of every layer, 0 where the layer has one MLP for all tokens.

    Raises:
        ValueError: ``layer_experts`` does not name every layer.
    """
    if config.layer_experts is None:
        count, interval = config.num_experts or 0, config.expert_interval
        return tuple(0 if (layer + 1) % interval else count for layer in range(config.num_layers))
    if len(config.layer_experts) != config.num_layers:
        raise ValueError(
            f"layer_experts has {len(config.layer_experts)} entries for num_layers "
            f"({config.num_layers}); give one for each layer, 0 for a layer without experts."
        )
    return tuple(0 if count == 1 else count for count in config.layer_experts)


def check_experts(config: Shape) -> None:
    """Raise ValueError unless the fields of the experts fit together."""
    counts = [count for count in experts_of_layers(config) if count]
    if config.layer_experts is not None and config.num_experts is not None:
        raise ValueError(
            f"layer_experts names the experts of every layer, so num_experts "
            f"({config.num_experts}) has nothing to say; leave one of the two out."
        )
    if min(config.layer_experts or (0,)) < 0:
        raise ValueError(f"layer_experts {config.layer_experts} must not be negative.")
    if config.layer_experts is None and config.num_experts is not None and not counts:
        raise ValueError(
            f"expert_interval ({config.expert_interval}) is larger than num_layers "
            f"({config.num_layers}), so no layer would have the {config.num_experts} experts. "
            f"Choose a smaller interval."
        )
    if counts and min(counts) < config.moe_topk:
        raise ValueError(
            f"moe_topk ({config.moe_topk}) is more than the {min(counts)} experts of a layer; "
            f"choose fewer, or more experts."
        )
    if config.moe_residual and config.moe_shared_hidden_size is not None:
        raise ValueError(
            f"moe_residual mixes an MLP of the usual width with the experts, and "
            f"moe_shared_hidden_size ({config.moe_shared_hidden_size}) adds one of its own width; "
            f"choose one of the two."
        )
    _check_noise(config)
    _check_numbers(config)


def _check_noise(config: Shape) -> None:
    if config.moe_noise == "rsample" and config.moe_topk != 1:
        raise ValueError(
            f'moe_noise="rsample" draws the one expert of a token, but moe_topk is '
            f"{config.moe_topk}; set moe_topk=1, or with 2 moe_sample_second."
        )
    if config.moe_sample_second and config.moe_topk != 2:
        raise ValueError(
            f"moe_sample_second draws the second of a token's two experts, but moe_topk is "
            f"{config.moe_topk}; set moe_topk=2, or leave it out."
        )


def _check_numbers(config: Shape) -> None:
    for name in ("moe_loss_coeff", "moe_z_loss_coeff"):
        if getattr(config, name) < 0.0:
            raise ValueError(f"{name} ({getattr(config, name)}) must not be negative.")
    for name in ("moe_capacity_factor", "moe_eval_capacity_factor"):
        factor = getattr(config, name)
        if factor is not None and not factor > 0.0:
            raise ValueError(f"{name} ({factor}) must be above 0; leave it out to drop no token.")


def capacity(tokens: int, *, experts: int, topk: int, factor: float, least: int) -> int:
    """Places of each expert for ``tokens`` tokens that choose ``topk`` experts each.

    >>> capacity(10, experts=4, topk=1, factor=1.5, least=2)
    4
    """
    return max(math.ceil(tokens / experts * factor * topk), least)


def mlp_params(config: Shape, *, width: int) -> int:
    """Trained numbers of an MLP of the given width."""
    wide = width * (2 if config.gated else 1)
    biases = wide + config.hidden_size if config.add_bias else 0
    return config.hidden_size * (wide + width) + biases


def routed_params(config: Shape, *, experts: int) -> int:
    """Trained numbers of a layer's router, experts and what stands beside them."""
    count = experts * (config.hidden_size + mlp_params(config, width=config.expert_width))
    if config.shared_width:
        count += mlp_params(config, width=config.shared_width)
    return count + (2 * config.hidden_size + 2 if config.moe_residual else 0)


def routed_active_weights(config: Shape, *, experts: int) -> int:
    """Weights that one token is multiplied with in a layer of experts."""
    per_width = config.hidden_size * (3 if config.gated else 2)
    width = config.moe_topk * config.expert_width + config.shared_width
    mixing = 2 * config.hidden_size if config.moe_residual else 0
    return experts * config.hidden_size + per_width * width + mixing
