"""The [memory] table: what is given up in speed for memory. Nothing here changes a result."""

from __future__ import annotations

from dataclasses import dataclass

from mds_train.config.checks import require_choice, require_positive

__all__ = ["OFFLOAD", "RECOMPUTE", "RECOMPUTE_MODULES", "MemoryConfig"]

RECOMPUTE = ("none", "selective", "full", "modules")
OFFLOAD = ("none", "cpu")
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

    sequence_chunk: int | None = None
    """Most positions that attention pairs with as many others, and that an MLP sees, at a time; all
    when left out. For long sequences: nothing then grows with the square of their length."""

    offload_activations: bool = False
    """Keep what the backward pass needs of the layers in the host's memory."""

    offload_optimizer: str = "none"
    """Where master weights and moments lie and are updated: "none" (with the model), or "cpu" with
    parallel.zero_stage 1 to 3 (ZeRO-Offload)."""

    offload_ratio: float = 1.0
    """Share of them that goes there; below 1 with zero_stage 3 and DeepSpeed's CPU Adam only."""

    offload_parameters: str = "none"
    """Where the weights lie that no layer works with: "none", or "cpu" with zero_stage 3."""

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
        self._check_offload()
        require_positive("memory.recompute_layers", self.recompute_layers)
        require_positive("memory.sequence_chunk", self.sequence_chunk)
        if self.recompute_layers > 1 and self.recompute != "full":
            raise ValueError(
                f"memory.recompute_layers is {self.recompute_layers}, but memory.recompute is "
                f'"{self.recompute}"; only "full" recomputes blocks of layers.'
            )

    def _check_offload(self) -> None:
        for key in ("offload_optimizer", "offload_parameters"):
            value = getattr(self, key)
            if value == "nvme":
                raise ValueError(
                    f'memory.{key} is "nvme", but what DeepSpeed moves there lies in files of its '
                    f'own, from which no checkpoint can be written; use "cpu".'
                )
            require_choice(f"memory.{key}", value, choices=OFFLOAD)
        if not 0 < self.offload_ratio <= 1:
            raise ValueError(
                f"memory.offload_ratio is {self.offload_ratio}, but it must be above 0 and at most "
                f'1; memory.offload_optimizer "none" moves nothing.'
            )
        if self.offload_ratio < 1 and self.offload_optimizer == "none":
            raise ValueError(
                f"memory.offload_ratio is {self.offload_ratio}, but nothing is moved; set "
                f'memory.offload_optimizer = "cpu".'
            )
