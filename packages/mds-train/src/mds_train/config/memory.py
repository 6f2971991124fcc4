"""The [memory] table: what is given up in speed for memory. Nothing here changes a result."""

from __future__ import annotations

from dataclasses import dataclass

from mds_train.config.checks import require_choice, require_positive

__all__ = ["RECOMPUTE", "MemoryConfig"]

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig:
    """What is computed twice."""

    recompute: str = "none"
    """What the backward pass computes again: "none", "selective" (attention) or "full" (layers)."""

    recompute_layers: int = 1
    """With "full": every block of so many layers keeps its input only."""

    def __post_init__(self) -> None:
        require_choice("memory.recompute", self.recompute, choices=RECOMPUTE)
        require_positive("memory.recompute_layers", self.recompute_layers)
        if self.recompute_layers > 1 and self.recompute != "full":
            raise ValueError(
                f"memory.recompute_layers is {self.recompute_layers}, but memory.recompute is "
                f'"{self.recompute}"; only "full" recomputes blocks of layers.'
            )
