"""The [parallel] table. The data-parallel size is what the ranks leave over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mds_train.config.checks import require_choice, require_positive

__all__ = ["INTERLEAVED", "STAGES_PER_RANK", "ParallelConfig"]

STAGES_PER_RANK: Mapping[str, int] = MappingProxyType(
    {
        "gpipe": 1,
        "1f1b": 1,
        "interleaved-1f1b": 2,
        "zb-h1": 1,
        "zb-h1-lazy": 1,
        "interleaved-zb": 2,
        "zb-v": 2,
        "dualpipe-v": 2,
    }
)
"""The pipeline schedules, and how many stages of the model each puts on a rank."""

_PARTITIONS = ("layers", "parameters", "time")
INTERLEAVED = ("interleaved-1f1b", "interleaved-zb")
"""Schedules that take more stages on a rank if asked to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How model and optimizer are spread over the ranks."""

    tp_size: int = 1
    """Tensor parallel: every layer is cut over this many neighbouring ranks."""

    pp_size: int = 1
    """Ranks that hold successive stages of the model (pipeline)."""

    schedule: str | None = None
    """Order of a pipeline's passes: "gpipe", "1f1b" (the usual), "interleaved-1f1b", "zb-h1",
    "zb-h1-lazy", "interleaved-zb", "zb-v" or "dualpipe-v"."""

    virtual_stages: int | None = None
    """Stages on each rank of an interleaved schedule; set alone it chooses "interleaved-1f1b"."""

    partition: str = "layers"
    """How stages share the layers: equally many "layers", or "parameters", or the "time" that they
    take when the run starts, or numbers "3,5"."""

    split_rank: int | None = None
    """Of a T5's pipeline: first rank that holds layers of the decoder, and none of the encoder; if
    left out, the stages share out the layers of both, and one may hold both kinds."""

    ulysses_size: int = 1
    """Ranks that share each sequence, by swapping it for heads in attention (DeepSpeed-Ulysses)."""

    sequence_sharing: str = "ulysses"
    """How they do it: "ulysses", or "ring", in which keys and values go round (context parallel,
    causal and balanced); then the number of heads does not limit ulysses_size."""

    sequence_parallel: bool = False
    """Split what lies between the tensor-parallel layers by position (Megatron's)."""

    ep_size: int = 1
    """Data-parallel ranks that share out the experts of a layer (expert parallel); with zero_stage
    0 to 2."""

    expert_tensor_parallel: bool = True
    """Cut every expert over the tensor-parallel ranks; else these hold it whole and share out the
    tokens."""

    zero_stage: int = 1
    """What is cut over dp: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights."""

    timeout_seconds: float = 300.0
    """A collective that waits longer than this ends the run."""

    def __post_init__(self) -> None:
        for key in ("tp_size", "pp_size", "ulysses_size", "ep_size", "timeout_seconds"):
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
        if self.ep_size > 1 and self.zero_stage > 2:
            raise ValueError(
                f"parallel.zero_stage 3 does not go together with parallel.ep_size {self.ep_size}: "
                f"use zero_stage 0 to 2, or ep_size 1."
            )
        require_choice(
            "parallel.sequence_sharing", self.sequence_sharing, choices=("ulysses", "ring")
        )
        self._check_stages()

    def _check_stages(self) -> None:
        require_positive("parallel.virtual_stages", self.virtual_stages)
        require_choice("parallel.schedule", self.pipeline_schedule, choices=tuple(STAGES_PER_RANK))
        usual = STAGES_PER_RANK[self.pipeline_schedule]
        wish = usual if self.virtual_stages is None else self.virtual_stages
        if wish != usual and (self.pipeline_schedule not in INTERLEAVED or wish < usual):
            raise ValueError(
                f"parallel.virtual_stages is {wish}, but parallel.schedule "
                f'"{self.pipeline_schedule}" puts {usual} on each rank; leave it out, or take one '
                f"of {', '.join(INTERLEAVED)}."
            )
        if self.partition not in _PARTITIONS and self.stage_sizes is None:
            raise ValueError(
                f"parallel.partition is {self.partition!r}, but it must be layers, parameters, "
                f'time, or the number of layers of each stage, like "3,5".'
            )
        if self.split_rank is not None:
            self._check_split(self.split_rank)

    def _check_split(self, split: int) -> None:
        if not 0 < split < self.pp_size:
            raise ValueError(
                f"parallel.split_rank is {split}, but it must be at least 1 and below "
                f"parallel.pp_size {self.pp_size}: both stacks need a rank."
            )
        if self.stage_count != self.pp_size or self.stage_sizes is not None:
            raise ValueError(
                f"parallel.split_rank {split} goes with one stage on each rank and partition "
                f"layers, parameters or time, but parallel.schedule is "
                f"{self.pipeline_schedule!r} with {self.stage_count} stages and partition "
                f"{self.partition!r}; leave it out, or change these."
            )

    @property
    def pipeline_schedule(self) -> str:
        """The schedule by name."""
        if self.schedule is None:
            return "interleaved-1f1b" if (self.virtual_stages or 1) > 1 else "1f1b"
        return self.schedule

    @property
    def in_a_ring(self) -> bool:
        """Whether keys and values go round the ranks that share a sequence."""
        return self.sequence_sharing == "ring" and self.ulysses_size > 1

    @property
    def stage_count(self) -> int:
        """Stages of the whole model."""
        if self.pp_size == 1:
            return 1
        return self.pp_size * (self.virtual_stages or STAGES_PER_RANK[self.pipeline_schedule])

    @property
    def stage_sizes(self) -> tuple[int, ...] | None:
        """Layers of each stage where parallel.partition lists them."""
        sizes = self.partition.split(",")
        if not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
            return None
        return tuple(int(size) for size in sizes)

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
        dp_size = world_size // model_ranks
        if dp_size % self.ep_size:
            raise ValueError(
                f"parallel.ep_size {self.ep_size} does not divide the {dp_size} data-parallel "
                f"rank{'s' * (dp_size != 1)} of {world_size}; start a multiple of "
                f"{model_ranks * self.ep_size} ranks, or make ep_size smaller."
            )
        return dp_size
