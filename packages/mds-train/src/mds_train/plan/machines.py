"""Accelerators as their makers' data sheets have them, and two constants that are fitted."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from mds_train.errors import UsageError

__all__ = ["FITTED", "MACHINES", "Fitted", "Machine", "machine_named"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """What a data sheet does not say: the two constants of the time model."""

    efficiency: float
    """Share of the peak that matrix products reach."""
    exposed: float
    """Seconds that a collective costs, over its bytes at the data sheet's bandwidth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One accelerator and what joins it to others."""

    name: str
    gigabytes: float
    """Memory in GB (10^9 bytes)."""
    teraflops: float
    """Dense bf16 peak; fp16 where bf16 is missing."""
    memory_gigabytes: float
    """GB a second between the accelerator and its memory."""
    node_gigabytes: float
    """GB a second to the others of its node, one way."""
    network_gigabytes: float
    """GB a second to other nodes, one way."""
    fitted_on: str
    """The kind whose published runs gave the two constants; itself or the nearest."""
    per_node: int = 8

    @property
    def fitted(self) -> Fitted:
        """The two constants of the time model."""
        return FITTED[self.fitted_on]


# Over all rows of published.toml; a test fits them again.
FITTED = {
    "a100-80": Fitted(efficiency=0.603, exposed=0.484),
    "h100": Fitted(efficiency=0.457, exposed=0.025),
    "h100-500w": Fitted(efficiency=0.383, exposed=0.060),
}

# Name, memory in GB, bf16 TFLOP/s, GB/s to memory, inside a node, to other nodes, whose constants.
_SHEETS = (
    ("v100-32", 32, 125, 900, 150, 12.5, "a100-80"),
    ("a100-40", 40, 312, 1555, 300, 25, "a100-80"),
    ("a100-80", 80, 312, 2039, 300, 25, "a100-80"),
    ("h100", 80, 989, 3350, 450, 50, "h100"),
    ("h100-500w", 96, 989, 2400, 450, 50, "h100-500w"),
    ("h200", 141, 989, 4800, 450, 50, "h100"),
    ("b200", 180, 2250, 8000, 900, 50, "h100"),
    ("mi250x", 128, 383, 3277, 150, 25, "a100-80"),
    ("mi300x", 192, 1307, 5300, 448, 50, "h100"),
)
MACHINES = {
    name: Machine(
        name=name,
        gigabytes=gigabytes,
        teraflops=teraflops,
        memory_gigabytes=memory,
        node_gigabytes=node,
        network_gigabytes=network,
        fitted_on=fitted_on,
    )
    for name, gigabytes, teraflops, memory, node, network, fitted_on in _SHEETS
}


def machine_named(name: str) -> Machine:
    """The machine of this name; UsageError with the nearest names if there is none."""
    if name in MACHINES:
        return MACHINES[name]
    near = difflib.get_close_matches(name, MACHINES, n=2, cutoff=0.3)
    hint = f"did you mean {' or '.join(near)}?" if near else ""
    raise UsageError(f"--gpu {name!r} is not known ({', '.join(MACHINES)}); {hint}".rstrip("; "))
