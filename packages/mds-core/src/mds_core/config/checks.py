"""Which shapes cannot be built, and which layouts do not divide one. Each message says a remedy."""

from __future__ import annotations

from dataclasses import fields

from mds_core.config.choices import check_choices, check_int
from mds_core.config.shape import Shape
from mds_core.expert_plan import check_experts

__all__ = ["check_expert_parallel", "check_shape", "check_tp", "check_ulysses"]


def check_shape(config: Shape) -> None:
    """Raise ValueError if a value is out of range or two values contradict each other."""
    check_choices(config)
    _check_whole_numbers(config)
    _check_sizes(config)
    _check_ratios(config)
    _check_rope(config)
    check_experts(config)
    if config.parallel_residual and config.residual_post_layernorm:
        raise ValueError(
            "parallel_residual and residual_post_layernorm exclude each other: with both there "
            "are two streams to add to. Switch one of them off."
        )


def _check_whole_numbers(config: Shape) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        if str(field.type).startswith("int") and value is not None:
            check_int(field.name, value)


def _check_sizes(config: Shape) -> None:
    if config.head_dim is None and config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"hidden_size ({config.hidden_size}) is not a multiple of num_attention_heads "
            f"({config.num_attention_heads}); each head needs hidden_size / num_attention_heads "
            f"channels. Change one of the two, or give head_dim."
        )
    if config.ffn_width < 1:
        raise ValueError(
            f"hidden_size ({config.hidden_size}) is too small for the width that a gated MLP has "
            f"by default, a multiple of 64; give ffn_hidden_size."
        )
    if config.num_attention_heads % config.kv_heads:
        raise ValueError(
            f"num_attention_heads ({config.num_attention_heads}) is not a multiple of "
            f"num_key_value_heads ({config.kv_heads}); every key/value head serves an equal "
            f"number of query heads. Change one of the two."
        )


def _check_ratios(config: Shape) -> None:
    for name in ("hidden_dropout", "attention_dropout"):
        if not 0.0 <= getattr(config, name) < 1.0:
            raise ValueError(
                f"{name} ({getattr(config, name)}) must be at least 0 and less than 1; it is "
                f"the share of values that is dropped."
            )
    if not 0.0 < config.rope_percent <= 1.0:
        raise ValueError(
            f"rope_percent ({config.rope_percent}) must be above 0 and at most 1; for no "
            f'rotation choose position_embedding="none".'
        )
    for name in ("norm_epsilon", "init_std", "rope_theta"):
        if not getattr(config, name) > 0.0:
            raise ValueError(f"{name} ({getattr(config, name)}) must be above 0.")


def _check_rope(config: Shape) -> None:
    scaling = config.rope_scaling
    if scaling is not None and config.position_embedding != "rope":
        raise ValueError(
            f"rope_scaling_type ({scaling.rope_type!r}) stretches rotary positions, but "
            f"position_embedding is {config.position_embedding!r}. Leave rope_scaling_type out "
            f'or choose position_embedding="rope".'
        )
    if scaling is not None and scaling.rope_type == "dynamic" and config.rope_channels <= 2:
        raise ValueError(
            f"dynamic scaling needs more than {config.rope_channels} rotating channels; choose "
            f"a larger head_dim or another rope_scaling_type."
        )
    if config.position_embedding == "rope" and config.rope_channels % 2:
        raise ValueError(
            f"rope_percent ({config.rope_percent}) of head_dim ({config.channels}) gives "
            f"{config.rope_channels} rotating channels; rotation needs pairs. Change one of them."
        )


def check_tp(config: Shape, tp_size: int) -> None:
    """Raise ValueError unless every split dimension divides by ``tp_size``."""
    for name, value in (
        ("num_attention_heads", config.num_attention_heads),
        ("ffn_hidden_size", config.ffn_width),
    ):
        if value % tp_size:
            raise ValueError(
                f"{name} ({value}) is not a multiple of tp_size ({tp_size}); each "
                f"tensor-parallel rank takes an equal share. Change one of the two."
            )
    _check_key_value_heads(config, tp_size)


def _check_key_value_heads(config: Shape, tp_size: int) -> None:
    """Ranks have equally many of them, or equally many ranks share each by its channels."""
    heads = config.kv_heads
    if heads % tp_size and (tp_size % heads or config.channels % (tp_size // heads)):
        raise ValueError(
            f"num_key_value_heads ({heads}, of {config.channels} channels) and tp_size ({tp_size}) "
            f"do not fit: one must be a multiple of the other, and ranks that share a head take "
            f"equal parts of its channels. Change one of the two."
        )


def check_expert_parallel(config: Shape, ep_size: int, *, tp_size: int = 1) -> None:
    """Raise ValueError unless the experts divide by ``ep_size`` and their width by tp_size."""
    if ep_size > 1 and not any(config.experts):
        raise ValueError(
            f"ep_size is {ep_size}, but the model has no experts to share out; set ep_size=1, "
            f"or give num_experts."
        )
    for layer, experts in enumerate(config.experts):
        if experts % ep_size:
            raise ValueError(
                f"layer {layer} has {experts} experts, not a multiple of ep_size ({ep_size}); "
                f"each rank takes an equal share. Change one of the two."
            )
    widths = {"the experts": config.expert_width, "the shared MLP": config.shared_width}
    for name, width in widths.items() if any(config.experts) else ():
        if width % tp_size:
            raise ValueError(
                f"the width of {name} ({width}) is not a multiple of tp_size ({tp_size}); each "
                f"tensor-parallel rank takes an equal share. Change one of the two."
            )


def check_ulysses(config: Shape, ulysses_size: int, *, tp_size: int = 1) -> None:
    """Raise ValueError if a tensor-parallel rank has fewer heads than ``ulysses_size``."""
    heads = config.num_attention_heads // tp_size
    if heads < ulysses_size:
        raise ValueError(
            f"num_attention_heads ({config.num_attention_heads}) leaves {heads} on each of "
            f"{tp_size} tensor-parallel ranks, fewer than ulysses_size ({ulysses_size}); each "
            f"rank attends with some of them. Change one of the three, or choose sequence_sharing "
            f'"ring".'
        )
