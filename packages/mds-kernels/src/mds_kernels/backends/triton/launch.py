"""How kernels are launched: on the tensor's own device, in blocks that fit the registers."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mds_kernels.backends.torch.graph_op import graph_op

LONGEST_ROW = 8192
"""Columns that one program can hold without spilling registers, as the compiler reports."""

_CPU_PROGRAMS = 4


def passes(fakes: dict[str, Callable[..., Any]]) -> Callable[[Callable[..., Any]], Any]:
    """Register a function ``_name`` as the graph op ``triton_name``, its shapes by ``fakes``."""

    def register(function: Callable[..., Any]) -> Any:
        name = function.__name__.removeprefix("_")
        return graph_op(f"triton_{name}", fake=fakes[name])(function)

    return register


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make the device of ``x`` the current one, which is where Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def row_block(columns: int) -> tuple[int, int]:
    """Return block and warps for a program that holds a whole row."""
    block = next_power_of_two(columns)
    if block > 4096:
        return block, 16
    return block, 8 if block > 2048 else 4


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below a number."""
    return 1 << max(0, number - 1).bit_length()


def num_programs(x: Tensor) -> int:
    """Return how many programs keep the device of ``x`` busy."""
    if x.is_cuda:
        return int(torch.cuda.get_device_properties(x.device).multi_processor_count)
    return _CPU_PROGRAMS
