"""Which backends each op has, in the order in which ``auto`` tries them; only what exists."""

from collections.abc import Callable, Mapping
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
    """``module:function`` that takes a device type and the environment, and returns why it can't
    run there, or None."""
    automatic_on: frozenset[str] | None = None
    """Device types on which ``auto`` may take it; None is every one, elsewhere on request only."""


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
        automatic_on=frozenset(),
    )


def _triton(target: str) -> Implementation:
    return Implementation(
        backend="triton",
        target=f"mds_kernels.backends.triton.{target}",
        dtypes=_LOW_AND_SINGLE,
        probe="mds_kernels.backends.triton.availability:why_not",
        automatic_on=frozenset({"cuda"}),  # elsewhere it is interpreted
    )


def _cuda(target: str) -> Implementation:
    return Implementation(
        backend="cuda",
        target=f"mds_kernels.backends.cuda.{target}",
        devices=frozenset({"cuda"}),
        dtypes=_LOW_AND_SINGLE,
        probe="mds_kernels.backends.cuda.library:why_not",
    )


def _cpu(target: str) -> Implementation:
    return Implementation(
        backend="cpu",
        target=f"mds_kernels.backends.cpu.{target}",
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32", "bfloat16"}),
        probe="mds_kernels.backends.cpu.library:why_not",
    )


def _flash(target: str) -> Implementation:
    return Implementation(
        backend="flash",
        target=f"mds_kernels.backends.flash.{target}",
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float16", "bfloat16"}),
        probe="mds_kernels.backends.flash.attention:why_not",
        automatic_on=frozenset(),
    )


def _each(target: str, *makers: Callable[[str], Implementation]) -> tuple[Implementation, ...]:
    """Return an op that lies in the same place in several backends."""
    return tuple(make(target) for make in makers)


OPS: Mapping[str, tuple[Implementation, ...]] = MappingProxyType(
    {
        "linear_cross_entropy": _each("linear_cross_entropy:linear_cross_entropy", _triton, _torch),
        "cross_entropy": _each("cross_entropy:cross_entropy", _triton, _torch),
        # torch's own norms are fused on CUDA, so NVIDIA apex is used on request only. On a CPU its
        # layer norm is as fast as ours, but its RMS norm is a chain of passes.
        "layer_norm": _each("norm:layer_norm", _torch, _apex),
        "rms_norm": _each("norm:rms_norm", _cpu, _torch, _apex),
        "add_layer_norm": _each("norm:add_layer_norm", _triton, _cuda, _torch, _cpu),
        "add_rms_norm": _each("norm:add_rms_norm", _triton, _cuda, _cpu, _torch),
        "swiglu": _each("glu:swiglu", _triton, _torch),
        "geglu": _each("glu:geglu", _triton, _torch),
        "rope": _each("rope:rope", _triton, _torch),
        "scaled_masked_softmax": _each("softmax:scaled_masked_softmax", _cuda, _triton, _torch),
        "bias_gelu": _each("bias:bias_gelu", _torch),
        "bias_dropout_add": _each("bias:bias_dropout_add", _torch),
        "moe_permute": _each("permutation:moe_permute", _triton, _torch),
        "moe_unpermute": _each("permutation:moe_unpermute", _triton, _torch),
        "wgrad_accumulate": _each("wgrad:wgrad_accumulate", _torch),
        # torch's attention has flash kernels of its own; a newer flash-attn is used on request.
        "attention": _each("attention:attention", _torch, _flash),
        "adamw": _each("adamw:adamw", _torch, _apex),
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
