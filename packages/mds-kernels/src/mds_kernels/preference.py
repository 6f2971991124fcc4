"""Which backend the user asked for: by argument, by context manager or by environment variable.

This is the one place of the package that reads ``MDS_KERNELS`` and ``MDS_KERNELS_<OP>``, and that
hands the environment to those who look for compilers and caches in it.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType

from mds_kernels.registry import BACKENDS, OPS

__all__ = [
    "BackendError",
    "Preference",
    "environment",
    "preference",
    "unknown_variables",
    "use_backend",
]

_VARIABLE = "MDS_KERNELS"
_EVERY_OP = ""
_CONTEXT: ContextVar[Mapping[str, str]] = ContextVar(
    "mds_kernels_backend", default=MappingProxyType({})
)


class BackendError(RuntimeError):
    """The backend that was asked for doesn't exist or can't be used here."""


@dataclass(frozen=True, slots=True)
class Preference:
    """A wish and where it was uttered."""

    backend: str
    """A backend's name, or "auto"."""
    origin: str
    for_this_op: bool
    """False for a wish about all ops, which an op without that backend need not follow."""


@contextlib.contextmanager
def use_backend(backend: str, *, op: str | None = None) -> Iterator[None]:
    """Ask for a backend inside a ``with`` block, of one op or (None) of every op that has it.

    Raises:
        BackendError: There is no such backend or op.
    """
    _check_name(backend, origin="use_backend")
    if op is not None and op not in OPS:
        raise BackendError(f"use_backend: there is no op {op!r}; there are {', '.join(OPS)}.")
    token = _CONTEXT.set({**_CONTEXT.get(), op or _EVERY_OP: backend})
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def preference(op: str, *, argument: str | None = None) -> Preference:
    """Return the strongest wish for an op: argument, then context, then environment, then auto.

    Raises:
        BackendError: The wish names no backend.
    """
    context = _CONTEXT.get()
    variable = f"{_VARIABLE}_{op.upper()}"
    wishes = (
        (argument, "the argument backend", True),
        (context.get(op), f"use_backend(op={op!r})", True),
        (context.get(_EVERY_OP), "use_backend", False),
        (os.environ.get(variable), variable, True),
        (os.environ.get(_VARIABLE), _VARIABLE, False),
    )
    for backend, origin, for_this_op in wishes:
        if backend:
            _check_name(backend, origin=origin)
            return Preference(backend, origin, for_this_op)
    return Preference("auto", "default", for_this_op=False)


def environment() -> Mapping[str, str]:
    """Return the variables of this process."""
    return os.environ


def unknown_variables() -> list[str]:
    """Return the names of environment variables that look like a wish about an op but name none."""
    known = {f"{_VARIABLE}_BUILD_DIR", *(f"{_VARIABLE}_{op.upper()}" for op in OPS)}
    return sorted(
        name for name in os.environ if name.startswith(f"{_VARIABLE}_") and name not in known
    )


def _check_name(backend: str, *, origin: str) -> None:
    if backend not in ("auto", *BACKENDS):
        raise BackendError(
            f"{origin} asks for backend {backend!r}, which does not exist; there are auto, "
            f"{', '.join(BACKENDS)}."
        )
