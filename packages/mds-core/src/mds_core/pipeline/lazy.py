"""Megatron-DeepSpeed's usual ZB-H1: weight gradients wait only where a rank would stand idle.

Rank i splits its first i backward passes and those after its last forward; between them it computes
both gradients at once, which saves traffic, and adds the weight gradients in another order. One of
the two places that know torch's actions by their private names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

__all__ = ["LazyZeroBubble"]

_Kind = torch_schedules._ComputationType


class LazyZeroBubble(torch_schedules._PipelineScheduleRuntime):
    """A schedule of torch.distributed.pipelining with one stage on each rank."""

    def __init__(
        self,
        stages: Sequence[Any],
        n_microbatches: int,
        *,
        loss_fn: Callable[..., Any] | None = None,
        scale_grads: bool = True,
    ) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            list(stages), n_microbatches, loss_fn=loss_fn, scale_grads=scale_grads
        )
        count = stages[0].num_stages
        self.pipeline_order = {
            rank: _actions(rank, count=count, micro_batches=n_microbatches) for rank in range(count)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)


def _actions(rank: int, *, count: int, micro_batches: int) -> list[Any]:
    ahead = min(micro_batches, count - 1 - rank)
    actions = [_action(rank, _Kind.FORWARD, m) for m in range(ahead)]
    waiting: list[int] = []
    for m in range(micro_batches):
        done = ahead + m >= micro_batches
        if not done:
            actions.append(_action(rank, _Kind.FORWARD, ahead + m))
        last = m == micro_batches - 1
        if not (m < min(rank, micro_batches - 1) or done or last):
            actions.append(_action(rank, _Kind.FULL_BACKWARD, m))
            continue
        actions.append(_action(rank, _Kind.BACKWARD_INPUT, m))
        waiting.append(m)
        if done and not last:
            actions.append(_action(rank, _Kind.BACKWARD_WEIGHT, waiting.pop(0)))
    return actions + [_action(rank, _Kind.BACKWARD_WEIGHT, m) for m in waiting]


def _action(stage: int, kind: Any, micro_batch: int) -> Any:
    return torch_schedules._Action(stage, kind, micro_batch)
