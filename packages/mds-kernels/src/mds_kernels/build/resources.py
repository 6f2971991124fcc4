"""What each kernel takes of a GPU, read from what ptxas says, and the most that it may take."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["LIMITS", "KernelUsage", "beyond_limits", "read_usage"]

LIMITS: Mapping[str, int] = MappingProxyType(
    {
        "norm_forward": 48,
        "norm_backward_x": 48,
        "norm_backward_weight": 56,
        "sum_parts": 32,
        "softmax_forward": 40,
        "softmax_backward": 48,
    }
)
"""Registers a thread that a kernel may use; with 64 a GPU would hold 4 blocks of 256. No spills."""

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(sm_\w+)'")
_SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_TYPES = {"f": "float32", "13__nv_bfloat16": "bfloat16", "6__half": "float16"}


@dataclass(frozen=True, slots=True)
class KernelUsage:
    """One kernel on one architecture."""

    kernel: str
    """Its name and number type, and whether it loads packs."""
    architecture: str
    registers: int
    stack: int
    """Bytes a thread of frame and spills in slow memory."""


def read_usage(log: str) -> tuple[KernelUsage, ...]:
    """Return what ``ptxas -v`` told of every kernel."""
    rows, entry, stack = [], None, 0
    for line in log.splitlines():
        if found := _ENTRY.search(line):
            entry, stack = found.groups(), 0
        elif found := _SPILL.search(line):
            stack = sum(map(int, found.groups()))
        elif (found := _USED.search(line)) and entry:
            rows.append(KernelUsage(_plain(entry[0]), entry[1], int(found[1]), stack))
            entry = None
    return tuple(rows)


def beyond_limits(usage: Iterable[KernelUsage]) -> list[KernelUsage]:
    """Return the kernels that spill or use more registers than the table allows."""
    return [
        row for row in usage if row.stack or row.registers > LIMITS.get(row.kernel.split("<")[0], 0)
    ]


def _plain(symbol: str) -> str:
    """Return ``kernel<type, pack>`` of a mangled name, or the name itself."""
    found = re.match(r"_ZN3mds\d+([a-z_]+?)I(f|13__nv_bfloat16|6__half)((?:Li\d+E)+)E", symbol)
    if not found:
        return symbol
    numbers = re.findall(r"Li(\d+)E", found[3])
    pack = f", {numbers[1]} at a time" if len(numbers) > 1 else ""
    return f"{found[1]}<{_TYPES[found[2]]}{pack}>"
