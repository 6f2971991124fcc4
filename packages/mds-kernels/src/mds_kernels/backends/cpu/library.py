"""The compiled library for a CPU: whether it can be used, and the shapes of its ops' results."""

import functools
from collections.abc import Mapping

import torch

from mds_kernels.backends.fused import norm
from mds_kernels.build.library import find_library, load_library, why_no_library


def why_not(_device: str, environment: Mapping[str, str]) -> str | None:
    """Return why the compiled kernels can't run on this machine, or None.

    A library that fits is loaded: one that can't be is no reason to stop, but to say so.
    """
    if reason := why_no_library("cpu", environment):
        return reason
    found = find_library("cpu", environment)
    assert found is not None
    try:
        load(found.library)
    except OSError as error:
        return f"{found.library} can't be loaded ({error}): mds-kernels build --device cpu --force"
    return None


@functools.cache
def load(path: str) -> None:
    """Load a library and tell torch the shapes of its ops' results."""
    load_library(path)
    for name, fake in norm.FAKES.items():
        torch.library.register_fake(f"mds_kernels::cpu_{name}", fake)
