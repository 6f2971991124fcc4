"""Which backends each op has, in the order in which ``auto`` tries them; only what exists."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["BACKENDS", "FUSED_BY_COMPILER", "OPS", "Implementation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """One op in one backend; nothing of it is imported until it is chosen."""

    backend: str
    target: str
    """Where it lies, as ``module:function``."""
    devices: frozenset[str] | None = None
    """Device types it runs on; None is every one."""
    dtypes: frozenset[str] | None = None
    """Names of the dtypes it takes; None is every floating one."""
    probe: str | None = None
    """``module:function`` that takes a device type and returns why it can't run there, or None."""
    automatic: bool = True
    """Whether ``auto`` may take it; without, it runs on request only."""


_LOW_AND_SINGLE = frozenset({"float32", "float16", "bfloat16"})


def _torch(target: str) -> Implementation:
    return Implementation(backend="torch", target=f"mds_kernels.backends.torch.{target}")


def _apex(target: str) -> Implementation:
    return Implementation(
        backend="apex",
        target=f"mds_kernels.backends.apex.{target}",
        devices=frozenset({"cuda"}),
        dtypes=_LOW_AND_SINGLE,
        probe=f"mds_kernels.backends.apex.{target.partition(':')[0]}:why_not",
        automatic=False,
    )


def _flash(target: str) -> Implementation:
    return Implementation(
        backend="flash",
        target=f"mds_kernels.backends.flash.{target}",
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float16", "bfloat16"}),
        probe="mds_kernels.backends.flash.attention:why_not",
        automatic=False,
    )


OPS: Mapping[str, tuple[Implementation, ...]] = MappingProxyType(
    {
        "linear_cross_entropy": (_torch("linear_cross_entropy:linear_cross_entropy"),),
        "cross_entropy": (_torch("cross_entropy:cross_entropy"),),
        # torch's own norms are fused on CUDA, so NVIDIA apex is used on request only.
        "layer_norm": (_torch("norm:layer_norm"), _apex("norm:layer_norm")),
        "rms_norm": (_torch("norm:rms_norm"), _apex("norm:rms_norm")),
        "add_layer_norm": (_torch("norm:add_layer_norm"),),
        "add_rms_norm": (_torch("norm:add_rms_norm"),),
        "swiglu": (_torch("glu:swiglu"),),
        "geglu": (_torch("glu:geglu"),),
        "rope": (_torch("rope:rope"),),
        "scaled_masked_softmax": (_torch("softmax:scaled_masked_softmax"),),
        "bias_gelu": (_torch("bias:bias_gelu"),),
        "bias_dropout_add": (_torch("bias:bias_dropout_add"),),
        "moe_permute": (_torch("permutation:moe_permute"),),
        "moe_unpermute": (_torch("permutation:moe_unpermute"),),
        "wgrad_accumulate": (_torch("wgrad:wgrad_accumulate"),),
        # torch's attention has flash kernels of its own; a newer flash-attn is used on request.
        "attention": (_torch("attention:attention"), _flash("attention:attention")),
        "adamw": (_torch("adamw:adamw"), _apex("adamw:adamw")),
    }
)
"""Every op by name, with its implementations in order of preference."""

FUSED_BY_COMPILER = frozenset(
    {
        "layer_norm",
        "rms_norm",
        "add_layer_norm",
        "add_rms_norm",
        "swiglu",
        "geglu",
        "rope",
        "scaled_masked_softmax",
        "bias_gelu",
        "bias_dropout_add",
    }
)
"""Ops that torch.compile fuses with their neighbours when they are plain torch, and only then."""

BACKENDS = ("torch", "triton", "cuda", "apex", "flash", "cpu")
"""Every backend's name."""
