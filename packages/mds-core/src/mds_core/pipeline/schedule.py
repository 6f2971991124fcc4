"""The pipeline schedules by name, and where each puts the stages.

All but one come from torch.distributed.pipelining. ZB-H1 is torch's interleaved zero bubble with
one stage on each rank: the two orders are equal action for action.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from torch.distributed.pipelining import schedules as torch_schedules

from mds_core.pipeline.lazy import LazyZeroBubble

__all__ = ["SCHEDULES", "Schedule", "schedule_named"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """One order of forward and backward passes.

    Attributes:
        name: As users write it.
        torch_class: The class of torch.distributed.pipelining that runs it.
        placement: ``single``: rank i holds stage i; ``loop``: also stages i + pp, i + 2 pp, ...;
            ``v``: stages i and 2 pp - 1 - i.
        splits: Whether weight gradients are computed apart from the input's.
    """

    name: str
    torch_class: type[Any]
    placement: Literal["single", "loop", "v"]
    splits: bool

    def stages_per_rank(self, chunks: int | None) -> int:
        """Stages that every rank holds; ``chunks`` is the user's wish, None for the usual."""
        usual = 1 if self.placement == "single" else 2
        if chunks is not None and chunks != usual and (self.placement != "loop" or chunks < 2):
            raise ValueError(
                f"schedule {self.name} holds {usual} stage{'s' if usual > 1 else ''} on each rank, "
                f"not {chunks}; leave chunks out or choose an interleaved schedule."
            )
        return chunks or usual

    def stage_indices(self, pp_rank: int, *, pp_size: int, chunks: int) -> tuple[int, ...]:
        """Which stages a rank holds, in the order that torch wants them."""
        if self.placement == "v":
            return (pp_rank, 2 * pp_size - 1 - pp_rank)
        return tuple(pp_rank + chunk * pp_size for chunk in range(chunks))

    def owners(self, *, pp_size: int, chunks: int) -> tuple[int, ...]:
        """The rank of every stage."""
        places = {
            index: rank
            for rank in range(pp_size)
            for index in self.stage_indices(rank, pp_size=pp_size, chunks=chunks)
        }
        return tuple(places[index] for index in range(len(places)))

    def check_micro_batches(self, count: int, *, pp_size: int) -> None:
        """Raise ValueError unless the schedule can run ``count`` micro batches."""
        any_number = dict.fromkeys(("gpipe", "zb-h1", "zb-h1-lazy"), 1)
        least = (any_number | {"dualpipe-v": 2 * pp_size}).get(self.name, pp_size)
        if count < least:
            raise ValueError(
                f"schedule {self.name} needs at least {least} micro batches with {pp_size} "
                f"pipeline ranks, and there are {count}; raise global_batch_size or choose gpipe."
            )
        rounds = max(1, count // pp_size)
        if (self.placement == "loop" or self.name == "zb-h1") and count % rounds:
            raise ValueError(
                f"schedule {self.name} runs its micro batches in {rounds} equal rounds, and "
                f"{count} do not divide; choose a multiple of {pp_size}."
            )


_ALL = (
    Schedule(
        name="gpipe",
        torch_class=torch_schedules.ScheduleGPipe,
        placement="single",
        splits=False,
    ),
    Schedule(
        name="1f1b",
        torch_class=torch_schedules.Schedule1F1B,
        placement="single",
        splits=False,
    ),
    Schedule(
        name="interleaved-1f1b",
        torch_class=torch_schedules.ScheduleInterleaved1F1B,
        placement="loop",
        splits=False,
    ),
    Schedule(
        name="zb-h1",
        torch_class=torch_schedules.ScheduleInterleavedZeroBubble,
        placement="single",
        splits=True,
    ),
    Schedule(
        name="zb-h1-lazy",
        torch_class=LazyZeroBubble,
        placement="single",
        splits=True,
    ),
    Schedule(
        name="interleaved-zb",
        torch_class=torch_schedules.ScheduleInterleavedZeroBubble,
        placement="loop",
        splits=True,
    ),
    Schedule(
        name="zb-v",
        torch_class=torch_schedules.ScheduleZBVZeroBubble,
        placement="v",
        splits=True,
    ),
    Schedule(
        name="dualpipe-v",
        torch_class=torch_schedules.ScheduleDualPipeV,
        placement="v",
        splits=True,
    ),
)
SCHEDULES: Mapping[str, Schedule] = MappingProxyType({schedule.name: schedule for schedule in _ALL})
"""Every schedule by its name."""


def schedule_named(name: str) -> Schedule:
    """Look a schedule up; an unknown name is an error that lists the known ones."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule ({name!r}) is unknown; choose one of {', '.join(SCHEDULES)}.")
    return SCHEDULES[name]
