"""The [memory] table: what is given up in speed for memory. Nothing here changes a result."""

from __future__ import annotations

from dataclasses import dataclass

from mds_train.config.checks import require_choice, require_positive

__all__ = ["RECOMPUTE", "RECOMPUTE_MODULES", "MemoryConfig"]

RECOMPUTE = ("none", "selective", "full", "modules")
RECOMPUTE_MODULES = ("core_attention", "attention", "norm", "activation", "mlp")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig:
    """What is computed twice or kept elsewhere."""

    recompute: str = "none"
    """What the backward pass computes again: "none", "selective" (attention), "full" (layers), or
    "modules": those of recompute_modules."""

    recompute_layers: int = 1
    """With "full": every block of so many layers keeps its input only."""

    recompute_modules: tuple[str, ...] = ()
    """With "modules", of each layer: core_attention or attention, norm, activation or mlp."""

    offload_activations: bool = False
    """Keep what the backward pass needs of the layers in the host's memory."""

    def __post_init__(self) -> None:
        require_choice("memory.recompute", self.recompute, choices=RECOMPUTE)
        for module in self.recompute_modules:
            require_choice("memory.recompute_modules", module, choices=RECOMPUTE_MODULES)
        if (self.recompute == "modules") != bool(self.recompute_modules):
            raise ValueError(
                f'memory.recompute is "{self.recompute}" and memory.recompute_modules is '
                f'{list(self.recompute_modules)}; give the list together with "modules".'
            )
        for whole, part in (("attention", "core_attention"), ("mlp", "activation")):
            if {whole, part} <= set(self.recompute_modules):
                raise ValueError(
                    f"memory.recompute_modules has {whole} and {part}, which is a part of it; "
                    f"leave one of the two out."
                )
        require_positive("memory.recompute_layers", self.recompute_layers)
        if self.recompute_layers > 1 and self.recompute != "full":
            raise ValueError(
                f"memory.recompute_layers is {self.recompute_layers}, but memory.recompute is "
                f'"{self.recompute}"; only "full" recomputes blocks of layers.'
            )
