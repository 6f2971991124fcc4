"""This rank's stages in motion: torch's schedules to train them, a relay to run them forward.

Shapes: ``b`` micro batch, ``s`` sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage

from mds_core.partition import Stage
from mds_core.pipeline.part import Part
from mds_core.pipeline.relay import MicroBatch, relay
from mds_core.pipeline.schedule import Schedule

__all__ = ["StageRuns"]

_SHAPES_KEPT = 4


@dataclass(kw_only=True, eq=False, slots=True)
class StageRuns:
    """How this rank's stages are run, with buffers for each shape of batch."""

    parts: Sequence[Part]
    """This rank's stages."""
    kind: type[Part]
    schedule: Schedule
    partition: Sequence[Stage]
    """All stages."""
    owners: Sequence[int]
    """Rank of each in ``group``."""
    group: ProcessGroup
    width: int
    """Of what stages hand on."""
    dtype: torch.dtype
    """Of the same."""
    _runs: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def train(self, tokens: Tensor, batch: dict[str, Tensor], *, count: int) -> None:
        """Run forward and backward passes of ``count`` micro batches by the schedule."""
        first, last = (any(getattr(p.stage, end) for p in self.parts) for end in ("first", "last"))
        # The loss is part of the last stage's forward; the target only makes torch ask for it.
        target = {"target": batch["labels"]} if last else {}
        arguments = (tokens,) if first else ()
        self._schedule_for(tokens, batch, count=count).step(
            *arguments, **target, return_outputs=False, **batch
        )

    def _hidden(self, index: int, tokens: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Room for what the stage of this index gets: this rank's share of the hidden states.

        Args:
            index: Of the stage; the number of stages for what the last one's layers give.
            tokens: [b, s] of a micro batch.
            batch: What else it has.
        """
        layer = sum(len(stage.layers) for stage in self.partition[:index])
        part = self.parts[0]
        positions = part.passed(layer, tokens=tokens, batch=batch) // part.held.sequence_shares
        shape = (tokens.size(0), positions, self.width)
        return torch.empty(shape, dtype=self.dtype, device=tokens.device)

    def _schedule_for(self, tokens: Tensor, batch: dict[str, Tensor], *, count: int) -> Any:
        """The schedule for batches of this shape; each shape has its own buffers.

        torch fixes buffers at the first step, and another length would be sent into them silently.
        Where lengths or numbers grow, buffers of the earlier ones are let go.
        """
        rows = _rows(tokens, count=count)
        key = (rows, count, *self.kind.lengths(tokens, batch))
        if key not in self._runs:
            self.schedule.check_micro_batches(count, pp_size=self.group.size())
            while len(self._runs) >= _SHAPES_KEPT:
                del self._runs[next(iter(self._runs))]
            stages = [self._torch_stage(part, tokens[:rows], batch) for part in self.parts]
            self._runs[key] = self.schedule.torch_class(
                stages if self.schedule.name not in ("gpipe", "1f1b") else stages[0],
                count,
                loss_fn=_computed_loss,
                # The 1 / m is in scale: torch would divide a table shared by two stages twice.
                scale_grads=False,
            )
        return self._runs[key]

    def _micro_batches(
        self, tokens: Tensor, batch: dict[str, Tensor], *, count: int
    ) -> list[MicroBatch]:
        rows = _rows(tokens, count=count)
        slices = [slice(first, first + rows) for first in range(0, tokens.size(0), rows)]
        return [
            MicroBatch(tokens[own], {name: tensor[own] for name, tensor in batch.items()})
            for own in slices
        ]

    def _torch_stage(self, part: Part, tokens: Tensor, batch: dict[str, Tensor]) -> PipelineStage:
        stage = part.stage
        arriving, leaving = (
            self._hidden(index, tokens, batch).requires_grad_()
            for index in (stage.index, stage.index + 1)
        )
        precision = torch.promote_types(self.dtype, torch.float32)
        loss = leaving.new_empty((), dtype=precision, requires_grad=True)
        # Shapes are given: torch would find them by a pass over uninitialised memory, whose weight
        # gradients would then be added to those of the first step.
        return PipelineStage(
            part,
            stage.index,
            stage.count,
            tokens.device,
            input_args=(tokens if stage.first else arriving,),
            output_args=(loss if stage.last else leaving,),
            group=self.group,
            dw_builder=part.gradients.take if part.gradients is not None else None,
        )

    def relay(
        self,
        stages: Mapping[int, Callable[..., Tensor]],
        tokens: Tensor,
        batch: dict[str, Tensor],
        *,
        count: int,
    ) -> None:
        """Run forward passes only, of these stages by index."""
        relay(
            stages,
            self._micro_batches(tokens, batch, count=count),
            owners=self.owners,
            group=self.group,
            buffer=lambda index, micro: self._hidden(index, micro.tokens, micro.shared),
        )


def _computed_loss(loss: Tensor, target: Tensor) -> Tensor:
    """What torch asks for; the last stage has computed it already."""
    del target
    return loss


def _rows(tokens: Tensor, *, count: int) -> int:
    """Samples of one of ``count`` micro batches."""
    rows, rest = divmod(tokens.size(0), count)
    if rest:
        raise ValueError(
            f"a batch of {tokens.size(0)} samples does not divide into {count} micro batches; "
            f"choose a multiple."
        )
    return rows
