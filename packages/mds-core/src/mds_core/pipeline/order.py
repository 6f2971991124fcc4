"""In which order each rank runs its passes: the orders of the schedules, and what makes one valid.

The only place that looks into torch's schedules; they are built here without ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.distributed.pipelining.stage import _PipelineStageBase

from mds_core.pipeline.schedule import Schedule

__all__ = ["Order", "Pass", "check_order", "gpipe_order", "one_f_one_b_order", "order_of"]


class Pass(NamedTuple):
    """One pass of one micro batch through one stage."""

    kind: Literal["F", "I", "W", "B"]
    """Forward, gradient of the input, gradient of the weights, or both gradients."""
    stage: int
    micro_batch: int


Order = Mapping[int, Sequence[Pass]]
"""For each rank its passes, in order."""


def order_of(
    schedule: Schedule, *, pp_size: int, micro_batches: int, chunks: int | None = None
) -> Order:
    """The passes of every rank under ``schedule``."""
    schedule.check_micro_batches(micro_batches, pp_size=pp_size)
    per_rank = schedule.stages_per_rank(chunks)
    if schedule.name == "gpipe":
        return gpipe_order(pp_size, micro_batches=micro_batches)
    if schedule.name == "1f1b":
        # torch's own listing of 1F1B leaves out the last rank's first forward.
        return one_f_one_b_order(pp_size, micro_batches=micro_batches)
    count = per_rank * pp_size
    own = schedule.stage_indices(0, pp_size=pp_size, chunks=per_rank)
    built = schedule.torch_class([_Stub(i, count, pp_size) for i in own], micro_batches)
    return {rank: _passes(actions) for rank, actions in built.pipeline_order.items()}


def _passes(actions: Sequence[Any]) -> list[Pass]:
    """Of one rank's actions of torch those that compute."""
    found = []
    for action in actions:
        for part in (action.sub_actions or (action,)) if action is not None else ():
            if part.computation_type.value in ("F", "I", "W", "B"):
                kind = part.computation_type.value
                found.append(Pass(kind, part.stage_index, part.microbatch_index))
    return found


class _Stub(_PipelineStageBase):
    """As much of a stage as torch's schedules ask for when they make their order."""

    def __init__(self, index: int, count: int, pp_size: int) -> None:
        self.stage_index, self.num_stages = index, count
        self.group_rank, self.group_size = 0, pp_size
        self.group, self.submod = None, nn.Identity()
        self.has_backward = True

    def _create_grad_recv_info(self, *_: Any) -> tuple[()]:
        return ()

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> None:
        return None

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> None:
        return None


def gpipe_order(pp_size: int, *, micro_batches: int) -> Order:
    """All forward passes, then all backward passes."""
    return {
        rank: [Pass(kind, rank, m) for kind in ("F", "B") for m in range(micro_batches)]
        for rank in range(pp_size)
    }


def one_f_one_b_order(pp_size: int, *, micro_batches: int) -> Order:
    """Forward until the first gradient arrives, then one backward after each forward."""
    order = {}
    for rank in range(pp_size):
        ahead = min(micro_batches, pp_size - 1 - rank)
        passes = [Pass("F", rank, m) for m in range(ahead)]
        for m in range(micro_batches):
            if ahead + m < micro_batches:
                passes.append(Pass("F", rank, ahead + m))
            passes.append(Pass("B", rank, m))
        order[rank] = passes
    return order


def check_order(order: Order, *, stages: int, micro_batches: int) -> dict[int, int]:
    """Raise ValueError unless ``order`` computes everything exactly once and in time.

    torch accepts repeated passes and wrong micro-batch numbers, and fails only while it runs.

    Returns:
        The rank of every stage.
    """
    owners: dict[int, int] = {}
    seen: set[Pass] = set()
    for rank, passes in order.items():
        for place, (kind, stage, micro_batch) in enumerate(passes):
            where = (
                f"rank {rank}, pass {place} ({kind} of stage {stage}, micro batch {micro_batch})"
            )
            if not 0 <= micro_batch < micro_batches or not 0 <= stage < stages:
                raise ValueError(
                    f"{where} is outside {stages} stages and {micro_batches} micro batches."
                )
            if owners.setdefault(stage, rank) != rank:
                raise ValueError(f"{where}: the stage stands on rank {owners[stage]} too.")
            _note(seen, kind, stage, micro_batch, where=where)
    _check_complete(seen, stages=stages, micro_batches=micro_batches)
    last = [p.micro_batch for p in order[owners[stages - 1]] if p[:2] == ("F", stages - 1)]
    if last != sorted(last):
        raise ValueError(
            f"the last stage runs micro batches in the order {last}; torch finds losses by place, "
            f"so it must be rising."
        )
    return owners


def _note(seen: set[Pass], kind: str, stage: int, micro_batch: int, *, where: str) -> None:
    before: dict[str, Literal["F", "I"] | None] = {"F": None, "I": "F", "W": "I"}
    parts: tuple[Literal["F", "I", "W"], ...] = ("I", "W") if kind == "B" else (kind,)  # type: ignore[assignment]
    for part in parts:
        need = before[part]
        if Pass(part, stage, micro_batch) in seen:
            raise ValueError(f"{where} is a repetition.")
        if need is not None and Pass(need, stage, micro_batch) not in seen:
            raise ValueError(f"{where} comes before the {need} that it needs.")
        seen.add(Pass(part, stage, micro_batch))


def _check_complete(seen: set[Pass], *, stages: int, micro_batches: int) -> None:
    kinds: tuple[Literal["F", "I", "W"], ...] = ("F", "I", "W")
    for stage in range(stages):
        for micro_batch in range(micro_batches):
            for kind in kinds:
                if Pass(kind, stage, micro_batch) not in seen:
                    raise ValueError(
                        f"{kind} of stage {stage}, micro batch {micro_batch} is missing."
                    )
