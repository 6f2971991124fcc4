"""What the fields of a configuration may be: the named choices, and checks of single values."""

from __future__ import annotations

from typing import Literal

__all__ = [
    "GATED",
    "Activation",
    "AttentionKernel",
    "BalanceChoices",
    "BalanceScope",
    "DropPolicy",
    "Normalization",
    "PositionEmbedding",
    "Recompute",
    "RecomputeModule",
    "RouterNoise",
    "SequenceSharing",
    "check_choice",
    "check_choices",
    "check_int",
]

Activation = Literal["gelu", "gelu_tanh", "relu", "relu2", "silu", "swiglu", "geglu", "geglu_tanh"]
Normalization = Literal["layernorm", "rmsnorm"]
PositionEmbedding = Literal["learned", "rope", "alibi", "none"]
Recompute = Literal["none", "selective", "full", "modules"]
RecomputeModule = Literal["core_attention", "attention", "norm", "activation", "mlp"]
SequenceSharing = Literal["ulysses", "ring"]
AttentionKernel = Literal["auto", "fused", "math"]
DropPolicy = Literal["position", "probability", "random"]
BalanceScope = Literal["sequence", "micro_batch"]
BalanceChoices = Literal["all", "first"]
RouterNoise = Literal["none", "rsample", "jitter"]

GATED: frozenset[str] = frozenset({"swiglu", "geglu", "geglu_tanh"})
_CHOICES: dict[str, tuple[str, ...]] = {
    "activation": (
        *("gelu", "gelu_tanh", "relu", "relu2", "silu"),
        *("swiglu", "geglu", "geglu_tanh"),
    ),
    "normalization": ("layernorm", "rmsnorm"),
    "position_embedding": ("learned", "rope", "alibi", "none"),
    "moe_drop_policy": ("position", "probability", "random"),
    "moe_balance_scope": ("sequence", "micro_batch"),
    "moe_balance_choices": ("all", "first"),
    "moe_noise": ("none", "rsample", "jitter"),
}


def check_choices(config: object) -> None:
    """Raise ValueError unless every field of named choices has one of them."""
    for name, choices in _CHOICES.items():
        check_choice(name, getattr(config, name), choices)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} ({value!r}) is unknown; choose one of {', '.join(choices)}.")


def check_int(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} ({value!r}) must be a whole number.")  # noqa: TRY004
    if value < 1:
        raise ValueError(f"{name} ({value}) must be at least 1.")
