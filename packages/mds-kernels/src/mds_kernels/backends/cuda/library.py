"""The compiled library: whether it can be used, and its ops with the shapes of their results."""

import functools
from collections.abc import Mapping

import torch

from mds_kernels.backends.fused import norm, softmax
from mds_kernels.build.library import find_library, load_library, why_no_library

_FAKES = {**norm.FAKES, **softmax.FAKES}


def why_not(_device: str, environment: Mapping[str, str]) -> str | None:
    """Return why the compiled kernels can't run on this machine, or None.

    A library that fits is loaded: one that can't be is no reason to stop, but to say so.
    """
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if reason := why_no_library("cuda", environment):
        return reason
    found = find_library("cuda", environment)
    assert found is not None
    try:
        load(found.library)
    except OSError as error:
        return f"{found.library} can't be loaded ({error}): mds-kernels build --force"
    return None


@functools.cache
def load(path: str) -> None:
    """Load a library and tell torch the shapes of its ops' results."""
    load_library(path)
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"mds_kernels::cuda_{name}", fake)
