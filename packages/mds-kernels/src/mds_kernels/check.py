"""Compare one case of an op, forward and backward, with float64 on any machine.

The error may be at most a little above that of the plain torch composition in the same dtype, so
that an inexact kernel can't hide behind a generous tolerance.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Generator, Tensor

from mds_kernels.testing import TOLERANCES, relative_error

__all__ = ["Check", "Measurement", "measure"]

Inputs = dict[str, Tensor | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A case of an op: three functions that take the same inputs by name and should agree."""

    op: str
    case: str
    inputs: Callable[[Generator], Inputs]
    """Makes float64 tensors, which are rounded to the dtype under test, and others."""
    run: Callable[..., Any]
    reference: Callable[..., Any]
    plain: Callable[..., Any]
    """The torch composition that anybody would write."""
    arguments: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Further arguments of all three."""
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Further arguments of ``run`` alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The worst of the results and gradients of one check."""

    op: str
    case: str
    dtype: str
    backend: str
    """The one that was asked for, or "auto"."""
    tensor: str
    """Which result or gradient was worst."""
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether the error is small enough; NaN is not."""
        return self.error <= self.allowed


def measure(
    check: Check,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    backend: str | None = None,
    seed: int = 0,
) -> Measurement:
    """Run a check and return its worst tensor, measured against what is allowed."""
    inputs = {name: _round(x, dtype) for name, x in check.inputs(_generator(seed)).items()}
    exact = _evaluate(check.reference, inputs, check.arguments, dtype=torch.float64, device="cpu")
    plain = _evaluate(check.plain, inputs, check.arguments, dtype=dtype, device=device)
    arguments = {**check.arguments, **check.options, "backend": backend}
    with _poisoned_memory():
        ours = _evaluate(check.run, inputs, arguments, dtype=dtype, device=device)
    floor = TOLERANCES[f"kernel_floor_{_name(dtype)}"]
    rows = [
        (
            name,
            relative_error(ours[name], exact[name]),
            TOLERANCES["kernel_ratio"] * relative_error(plain[name], exact[name]) + floor,
        )
        for name in exact
    ]
    tensor, error, allowed = max(rows, key=lambda row: _badness(row[1], row[2]))
    return Measurement(
        op=check.op,
        case=check.case,
        dtype=_name(dtype),
        backend=backend or "auto",
        tensor=tensor,
        error=error,
        allowed=allowed,
    )


def _evaluate(
    function: Callable[..., Any],
    inputs: Inputs,
    arguments: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: str,
) -> dict[str, Tensor]:
    """Return results and gradients by name."""
    ready = {name: _place(x, dtype, device) for name, x in inputs.items()}
    leaves = {name: x for name, x in ready.items() if x is not None and x.requires_grad}
    returned = function(**ready, **arguments)
    results = (returned,) if isinstance(returned, Tensor) else tuple(returned)
    named = {f"result {number}": result for number, result in enumerate(results)}
    differentiable = [result for result in results if result.requires_grad]
    if not leaves:  # an op that changes its arguments in place, or an optimizer
        return named
    gradients = torch.autograd.grad(
        differentiable,
        list(leaves.values()),
        [_cotangent(result, inputs) for result in differentiable],
    )
    named |= {f"gradient of {name}": gradients[i] for i, name in enumerate(leaves)}
    return named


def _cotangent(result: Tensor, inputs: Inputs) -> Tensor:
    """Return an incoming gradient that is the same for all three, whatever their dtypes."""
    dtype = next(x.dtype for x in inputs.values() if x is not None and x.is_floating_point())
    values = torch.randn(result.shape, generator=_generator(1), dtype=torch.float64)
    return values.to(dtype).to(result)


def _place(x: Tensor | None, dtype: torch.dtype, device: str) -> Tensor | None:
    """Return a fresh leaf with the strides of ``x``."""
    if x is None or not x.is_floating_point():
        return x if x is None else x.to(device)
    wanted = x.requires_grad
    return x.detach().to(device=device, dtype=dtype, copy=True).requires_grad_(wanted)


def _round(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if x is None or not x.is_floating_point():
        return x
    return x.detach().to(dtype).requires_grad_(x.requires_grad)


@contextlib.contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Fill fresh memory with NaN, so that a result that was never written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=before, warn_only=warned)


def _badness(error: float, allowed: float) -> float:
    ratio = error / allowed
    return math.inf if math.isnan(ratio) else ratio


def _generator(seed: int) -> Generator:
    return torch.Generator().manual_seed(seed)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
