"""A model whose stages stand on successive ranks, trained batch by batch.

Shapes: ``b`` micro batch, ``m`` number of micro batches, ``s`` sequence, ``h`` hidden, ``t``
tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from mds_core.config import Execution, GPTConfig
from mds_core.groups import ProcessGroups
from mds_core.models.gpt import GPT
from mds_core.partition import Stage, balance
from mds_core.pipeline.kinds import part_of
from mds_core.pipeline.part import Part, given
from mds_core.pipeline.relay import MicroBatch, relay
from mds_core.pipeline.schedule import schedule_named
from mds_core.pipeline.shared import SharedParameters
from mds_core.sharding import ParameterShard

__all__ = ["Pipeline", "PipelineLoss"]

_SHAPES_KEPT = 4


class PipelineLoss(NamedTuple):
    """What a step gives."""

    loss_sum: Tensor
    """Scalar, the masked sum over all micro batches, detached; equal on all ranks."""
    losses: Tensor | None
    """[m b, s] losses of the tokens on the rank of the last stage; None elsewhere."""
    binary_sum: Tensor | None = None
    """Scalar, of a BERT with binary labels the sum of their losses; equal on all ranks."""


class Pipeline(nn.Module):
    """This rank's stages of a GPT, BERT or T5 and the schedule that runs them.

    A T5's stages share out the layers of its encoder and, behind them, of its decoder.

    Args:
        config: Shape of the whole model; its type says which kind it is.
        groups: Its ranks, at least two along ``pp``.
        micro_batches: Parts of a batch that follow each other through the stages.
        schedule: Name of the order of their passes, one of `SCHEDULES`.
        chunks: Stages on each rank of an interleaved schedule; 2 if None.
        stages: The layers of each stage, from `mds_core.partition`; even if None.
        seed: Of start values and dropout masks.
        dtype: Of parameters and activations.
        device: Of the parameters.
        execution: How to compute.
        grad_dtype: In which gradients are summed over the micro batches; that of the parameters if
            None. With bfloat16 parameters float32 keeps what their own dtype would round away.
    """

    def __init__(
        self,
        config: GPTConfig,
        groups: ProcessGroups,
        *,
        micro_batches: int,
        schedule: str = "1f1b",
        chunks: int | None = None,
        stages: Sequence[Stage] | None = None,
        seed: int = 1234,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        execution: Execution | None = None,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config, self.groups, self.seed, self.dtype = config, groups, seed, dtype
        self.schedule, self.micro_batches = schedule_named(schedule), micro_batches
        if groups.pp is None:
            raise ValueError(
                "a pipeline needs pp_size of at least 2; with 1 build the model itself."
            )
        self._pp, self._kind = groups.pp, part_of(config)
        self.schedule.check_micro_batches(micro_batches, pp_size=groups.pp_size)
        per_rank = self.schedule.stages_per_rank(chunks)
        self.partition = _checked(stages, config, count=per_rank * groups.pp_size)
        self._owners = self.schedule.owners(pp_size=groups.pp_size, chunks=per_rank)
        own = self.schedule.stage_indices(groups.pp_rank, pp_size=groups.pp_size, chunks=per_rank)
        self._parts = [
            self._kind.build(
                config,
                groups,
                splits=self.schedule.splits,
                seed=seed,
                dtype=dtype,
                device=device,
                execution=execution,
                stage=self.partition[index],
            )
            for index in own
        ]
        self.models = nn.ModuleList(part.model for part in self._parts)
        self._shared = SharedParameters(
            {part.stage.index: part.model for part in self._parts},
            stages=self._kind.shared(config, self.partition),
            owners=self._owners,
            groups=groups,
        )
        if grad_dtype is not None:
            for parameter in self.models.parameters():
                parameter.grad_dtype = grad_dtype
        self._runs: dict[tuple[int, ...], Any] = {}

    def canonical_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by canonical name."""
        return {name: p for model in self.models for name, p in model.named_parameters()}

    def parameter_shards(self) -> dict[str, ParameterShard]:
        """What this rank holds of each of its parameters, by canonical name."""
        return {
            name: shard
            for part in self._parts
            for name, shard in part.held.parameter_shards().items()
        }

    def expert_parameters(self) -> frozenset[str]:
        """Names of this rank's experts' parameters, as for `GPT.expert_parameters`."""
        gpts = [model for model in self.models if isinstance(model, GPT)]
        return frozenset().union(*(model.expert_parameters() for model in gpts))

    @property
    def copies(self) -> frozenset[str]:
        """Names of parameters that a stage on another rank owns, counts and saves."""
        return self._shared.copies

    def step(
        self,
        tokens: Tensor,
        labels: Tensor,
        *,
        samples: Tensor | None = None,
        micro_batches: int | None = None,
        scale: float | Tensor | Sequence[float | Tensor] = 1.0,
        **inputs: Tensor | None,
    ) -> PipelineLoss:
        """Run forward and backward of one batch; every rank calls it with the whole batch.

        Gradients of ``scale * loss_sum`` are added to the parameters' ``grad``; those of parameters
        that several stages hold, as a tied embedding, are summed over these.

        Args:
            tokens: [m b, s] int64 ids.
            labels: [m b, s] int64 ids, as the model's ``forward`` takes them.
            samples: [m b] numbers of the samples, needed if the model has dropout.
            micro_batches: Parts of this batch; those given when the pipeline was built if None.
            scale: Factor of the loss in the backward pass; of a BERT with binary labels two, of the
                words' and of the binary loss.
            **inputs: What else the model's ``forward`` takes of a batch, by the same names. Of a
                GPT ``loss_mask``, ``position_ids`` and ``cumulative_lengths``; of a BERT
                ``loss_mask``, ``binary_labels``, ``token_types`` and ``padding_mask``; of a T5
                ``decoder_tokens``, ``loss_mask`` and ``padding_mask``.
        """
        batch = self._prepared(tokens, labels, inputs)
        if samples is not None:
            batch["samples"] = samples
        self._begin(batch, scale)
        before = self._shared.put_aside()
        self._train(tokens, batch, count=micro_batches or self.micro_batches)
        self._shared.sum_gradients()
        self._shared.add(before)
        return self._collect(tokens, batch)

    @torch.no_grad()
    def evaluate(
        self,
        tokens: Tensor,
        labels: Tensor,
        *,
        micro_batches: int | None = None,
        **inputs: Tensor | None,
    ) -> PipelineLoss:
        """Run the forward passes of one batch only; arguments as for `step`.

        ``micro_batches`` may differ from those of training, since no schedule is needed here.
        """
        batch = self._prepared(tokens, labels, inputs)
        self._begin(batch, 1.0)
        relay(
            {part.stage.index: part for part in self._parts},
            self._micro_batches(tokens, batch, count=micro_batches or self.micro_batches),
            owners=self._owners,
            group=self._pp,
            buffer=lambda index, micro: self._hidden(index, micro.tokens, micro.shared),
        )
        return self._collect(tokens, batch)

    def _prepared(
        self, tokens: Tensor, labels: Tensor, inputs: dict[str, Tensor | None]
    ) -> dict[str, Tensor]:
        return self._kind.prepared(tokens, {"labels": labels, **given(self._kind, inputs)})

    def _begin(
        self, batch: dict[str, Tensor], scale: float | Tensor | Sequence[float | Tensor]
    ) -> None:
        """Tell the stages the factor of each of the loss's terms."""
        terms = self._kind.terms(self.config, batch)
        scales = (scale,) * terms if isinstance(scale, (int, float, Tensor)) else tuple(scale)
        if len(scales) != terms:
            raise ValueError(
                f"scale has {len(scales)} factors, but the loss has {terms} "
                f"term{'s' * (terms > 1)}; give one for each, or one number."
            )
        for part in self._parts:
            part.begin(scales)

    def _train(self, tokens: Tensor, batch: dict[str, Tensor], *, count: int) -> None:
        first, last = (any(getattr(p.stage, end) for p in self._parts) for end in ("first", "last"))
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
        part = self._parts[0]
        positions = part.passed(layer, tokens=tokens, batch=batch) // part.held.sequence_shares
        shape = (tokens.size(0), positions, self.config.hidden_size)
        return torch.empty(shape, dtype=self.dtype, device=tokens.device)

    def _schedule_for(self, tokens: Tensor, batch: dict[str, Tensor], *, count: int) -> Any:
        """The schedule for batches of this shape; each shape has its own buffers.

        torch fixes buffers at the first step, and another length would be sent into them silently.
        Where lengths or numbers grow, buffers of the earlier ones are let go.
        """
        rows = _rows(tokens, count=count)
        key = (rows, count, *self._kind.lengths(tokens, batch))
        if key not in self._runs:
            self.schedule.check_micro_batches(count, pp_size=self.groups.pp_size)
            while len(self._runs) >= _SHAPES_KEPT:
                del self._runs[next(iter(self._runs))]
            stages = [self._torch_stage(part, tokens[:rows], batch) for part in self._parts]
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
            group=self._pp,
            dw_builder=part.gradients.take if part.gradients is not None else None,
        )

    def _collect(self, tokens: Tensor, batch: dict[str, Tensor]) -> PipelineLoss:
        """Tell every rank the loss that the last stage computed, with every stage's routing."""
        last = next((part for part in self._parts if part.stage.last), None)
        precision = torch.promote_types(self.dtype, torch.float32)
        terms = self._kind.terms(self.config, batch)
        sums = torch.zeros(terms, dtype=precision, device=tokens.device)
        if own := [value for part in self._parts for value in part.sums]:
            sums = torch.stack(own).sum(0)
        dist.all_reduce(sums, group=self._pp)
        return PipelineLoss(
            sums[0],
            None if last is None else torch.cat(last.losses),
            sums[1] if terms > 1 else None,
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


def _checked(stages: Sequence[Stage] | None, config: GPTConfig, *, count: int) -> tuple[Stage, ...]:
    if stages is None:
        return balance([1.0] * config.stacked_layers, count=count)
    layers = sum(len(stage.layers) for stage in stages)
    if len(stages) != count or layers != config.stacked_layers:
        raise ValueError(
            f"{len(stages)} stages of together {layers} layers were given; this schedule needs "
            f"{count} stages and the model has {config.stacked_layers} layers."
        )
    return tuple(stages)
