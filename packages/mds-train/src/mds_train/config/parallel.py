"""The [parallel] table. The data-parallel size is what the ranks leave over."""

from __future__ import annotations

from dataclasses import dataclass

from mds_train.config.checks import require_positive

__all__ = ["ParallelConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How model and optimizer are spread over the ranks."""

    tp_size: int = 1
    """Tensor parallel: every layer is cut over this many neighbouring ranks."""

    pp_size: int = 1
    """Pipeline stages."""

    ulysses_size: int = 1
    """Ranks that share each sequence and swap it for heads in attention (DeepSpeed-Ulysses)."""

    sequence_parallel: bool = False
    """Split what lies between the tensor-parallel layers by position (Megatron's)."""

    zero_stage: int = 1
    """What is cut over dp: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights."""

    timeout_seconds: float = 300.0
    """A collective that waits longer than this ends the run."""

    def __post_init__(self) -> None:
        for key in ("tp_size", "pp_size", "ulysses_size", "timeout_seconds"):
            require_positive(f"parallel.{key}", getattr(self, key))
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(
                f"parallel.zero_stage is {self.zero_stage}, but it must be 0, 1, 2 or 3."
            )
        if self.pp_size > 1 and self.zero_stage > 1:
            raise ValueError(
                f"parallel.zero_stage {self.zero_stage} does not go together with pipeline "
                f"stages (parallel.pp_size {self.pp_size}): use zero_stage 1, or pp_size 1."
            )
        if self.pp_size > 1:
            raise ValueError(
                f"parallel.pp_size is {self.pp_size}, but only 1 is supported yet; "
                f"use parallel.tp_size and data parallelism instead."
            )

    def dp_size(self, world_size: int) -> int:
        """Number of data-parallel replicas when so many ranks take part.

        Raises:
            ValueError: If the ranks cannot be divided so.
        """
        model_ranks = self.tp_size * self.pp_size * self.ulysses_size
        if world_size % model_ranks:
            raise ValueError(
                f"{world_size} rank{'s' * (world_size != 1)} cannot be divided by tp_size "
                f"{self.tp_size} * pp_size {self.pp_size} * ulysses_size {self.ulysses_size} = "
                f"{model_ranks}; start a multiple of {model_ranks} ranks (`torchrun "
                f"--nproc-per-node {model_ranks} -m mds_train ...`) or make the sizes smaller."
            )
        return world_size // model_ranks
