"""Accelerators as their makers' data sheets have them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from mds_train.errors import UsageError

__all__ = ["MACHINES", "Machine", "machine_named"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One accelerator and what joins it to others."""

    name: str
    gigabytes: float
    """Memory in GB (10^9 bytes)."""
    teraflops: float
    """Dense bf16 peak; fp16 where bf16 is missing."""
    node_gigabytes: float
    """GB a second to the others of its node, one way."""
    network_gigabytes: float
    """GB a second to other nodes, one way."""
    per_node: int = 8


# Name, memory in GB, bf16 TFLOP/s, GB/s inside a node and to other nodes.
_SHEETS = (
    ("v100-32", 32, 125, 150, 12.5),
    ("a100-40", 40, 312, 300, 25),
    ("a100-80", 80, 312, 300, 25),
    ("h100", 80, 989, 450, 50),
    ("h200", 141, 989, 450, 50),
    ("b200", 180, 2250, 900, 50),
    ("mi250x", 128, 383, 150, 25),
    ("mi300x", 192, 1307, 448, 50),
)
MACHINES = {
    name: Machine(
        name=name,
        gigabytes=gigabytes,
        teraflops=teraflops,
        node_gigabytes=node,
        network_gigabytes=network,
    )
    for name, gigabytes, teraflops, node, network in _SHEETS
}


def machine_named(name: str) -> Machine:
    """The machine of this name; UsageError with the nearest names if there is none."""
    if name in MACHINES:
        return MACHINES[name]
    near = difflib.get_close_matches(name, MACHINES, n=2, cutoff=0.3)
    hint = f"did you mean {' or '.join(near)}?" if near else ""
    raise UsageError(f"--gpu {name!r} is not known ({', '.join(MACHINES)}); {hint}".rstrip("; "))
