"""Which linear layers of a model get low-rank adapters, and of which kind."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ADAPTED", "AdapterConfig"]

ADAPTED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""The linear layers of a transformer layer, which can have adapters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """Which linear layers get adapters, and of which kind."""

    rank: int
    """Width between A and B."""
    alpha: float
    """What B A is multiplied by, times the rank."""
    dropout: float = 0.0
    """Share of the inputs of A that are dropped in training."""
    targets: tuple[str, ...] = ADAPTED
    """Names of linear layers, of `ADAPTED`."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"an adapter of rank {self.rank} adapts nothing; take at least 1.")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"the adapters' dropout is {self.dropout}, not from 0 to below 1.")
        unknown = sorted(set(self.targets) - set(ADAPTED))
        if unknown or not self.targets:
            raise ValueError(
                f"adapters stand beside {', '.join(ADAPTED)}; choose among these, not "
                f"{', '.join(unknown) or 'none'}."
            )

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank
