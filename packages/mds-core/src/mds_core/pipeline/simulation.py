"""How long a schedule takes, what it leaves idle and what it holds, before any rank runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mds_core.pipeline.order import Order, Pass, check_order, order_of
from mds_core.pipeline.schedule import schedule_named

__all__ = ["Simulation", "Span", "Times", "simulate", "simulate_order"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """What the passes of one micro batch take on one rank, over all of its stages."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    transfer: float = 0.0
    """Between two ranks, beside the computation."""

    def of(self, kind: str) -> float:
        """The time of one kind of pass."""
        return {
            "F": self.forward,
            "I": self.input_gradient,
            "W": self.weight_gradient,
            "B": self.input_gradient + self.weight_gradient,
        }[kind]


class Span(NamedTuple):
    """One pass and when it ran."""

    rank: int
    start: float
    stop: float
    what: Pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """What came out.

    Attributes:
        makespan: From the first pass's start to the last one's end.
        bubble: Time that a rank stands idle while the step lasts.
        bubble_share: The same as a share of all ranks' time.
        peak_activations: Most that each rank held at once; 1 is one micro batch through all of a
            rank's stages, held from its forward pass until its weight gradients are computed.
        spans: Every pass, in the order of their starts.
    """

    makespan: float
    bubble: float
    bubble_share: float
    peak_activations: tuple[float, ...]
    spans: tuple[Span, ...]


def simulate(
    schedule: str,
    *,
    pp_size: int,
    micro_batches: int,
    times: Times | None = None,
    chunks: int | None = None,
) -> Simulation:
    """Play a schedule through without running anything.

    Args:
        schedule: Its name, one of `SCHEDULES`.
        pp_size: Ranks along the pipeline.
        micro_batches: Parts of a batch.
        times: Of the passes; all 1 if None.
        chunks: Stages on each rank of an interleaved schedule; 2 if None.
    """
    kind = schedule_named(schedule)
    order = order_of(kind, pp_size=pp_size, micro_batches=micro_batches, chunks=chunks)
    stages = kind.stages_per_rank(chunks) * pp_size
    return simulate_order(order, stages=stages, micro_batches=micro_batches, times=times)


def simulate_order(
    order: Order, *, stages: int, micro_batches: int, times: Times | None = None
) -> Simulation:
    """Play any order of passes through; every rank runs its list, waiting for what it needs."""
    times = times or Times()
    owners = check_order(order, stages=stages, micro_batches=micro_batches)
    spans = _play(order, owners, stages=stages, times=times)
    makespan = max(span.stop for span in spans)
    work = micro_batches * (times.of("F") + times.of("B"))
    return Simulation(
        makespan=makespan,
        bubble=makespan - work,
        bubble_share=1 - work / makespan,
        peak_activations=_peaks(order, per_rank=stages // len(order)),
        spans=tuple(sorted(spans, key=lambda span: (span.start, span.rank))),
    )


def _play(order: Order, owners: Mapping[int, int], *, stages: int, times: Times) -> list[Span]:
    per_rank = stages // len(order)
    ended: dict[tuple[str, int, int], float] = {}
    free = dict.fromkeys(order, 0.0)
    place = dict.fromkeys(order, 0)
    spans: list[Span] = []
    while waiting := [rank for rank in order if place[rank] < len(order[rank])]:
        starts = {}
        for rank in waiting:
            arrived = _arrival(order[rank][place[rank]], ended, owners, stages, times.transfer)
            if arrived is not None:
                starts[rank] = max(arrived, free[rank])
        if not starts:
            stuck = ", ".join(f"rank {rank} at {order[rank][place[rank]]}" for rank in waiting)
            raise ValueError(f"this order never ends: {stuck} wait for each other.")
        rank = min(starts, key=lambda candidate: (starts[candidate], candidate))
        what = order[rank][place[rank]]
        stop = starts[rank] + times.of(what.kind) / per_rank
        spans.append(Span(rank, starts[rank], stop, what))
        ended["I" if what.kind == "B" else what.kind, what.stage, what.micro_batch] = stop
        free[rank] = stop
        place[rank] += 1
    return spans


def _arrival(
    what: Pass,
    ended: Mapping[tuple[str, int, int], float],
    owners: Mapping[int, int],
    stages: int,
    transfer: float,
) -> float | None:
    """When the input of a pass is there; None if nobody has computed it yet."""
    forward = what.kind == "F"
    source = what.stage - 1 if forward else what.stage + 1
    if what.kind == "W" or not 0 <= source < stages:
        return 0.0
    end = ended.get(("F" if forward else "I", source, what.micro_batch))
    if end is None:
        return None
    return end + (transfer if owners[source] != owners[what.stage] else 0.0)


def _peaks(order: Order, *, per_rank: int) -> tuple[float, ...]:
    peaks = []
    for rank in sorted(order):
        held = peak = 0
        for what in order[rank]:
            held += {"F": 1, "I": 0, "W": -1, "B": -1}[what.kind]
            peak = max(peak, held)
        peaks.append(peak / per_rank)
    return tuple(peaks)
