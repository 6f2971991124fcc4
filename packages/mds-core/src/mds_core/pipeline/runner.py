"""A GPT whose stages stand on successive ranks, trained batch by batch.

Shapes: ``b`` micro batch, ``m`` number of micro batches, ``s`` sequence, ``h`` hidden, ``t``
tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from mds_core.config import Execution, GPTConfig
from mds_core.groups import ProcessGroups
from mds_core.layers.side_loss import with_loss
from mds_core.models.gpt import GPT, document_numbers
from mds_core.partition import Stage, balance
from mds_core.pipeline.deferred import WeightGradients
from mds_core.pipeline.relay import relay
from mds_core.pipeline.schedule import schedule_named
from mds_core.rng import DropoutKey
from mds_core.sharding import ParameterShard

__all__ = ["Pipeline", "PipelineLoss"]

_TIED = "embedding.word_embeddings.weight"
_SHAPES_KEPT = 4


class PipelineLoss(NamedTuple):
    """What a step gives."""

    loss_sum: Tensor
    """Scalar, the masked sum over all micro batches, detached; equal on all ranks."""
    losses: Tensor | None
    """[m b, s] losses of the tokens on the rank of the last stage; None elsewhere."""


class Pipeline(nn.Module):
    """This rank's stages of a GPT and the schedule that runs them.

    Args:
        config: Shape of the whole model.
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
            raise ValueError("a pipeline needs pp_size of at least 2; with 1 build the GPT itself.")
        self._pp = groups.pp
        self.schedule.check_micro_batches(micro_batches, pp_size=groups.pp_size)
        per_rank = self.schedule.stages_per_rank(chunks)
        self.partition = _checked(stages, config, count=per_rank * groups.pp_size)
        self._owners = self.schedule.owners(pp_size=groups.pp_size, chunks=per_rank)
        own = self.schedule.stage_indices(groups.pp_rank, pp_size=groups.pp_size, chunks=per_rank)
        self._gpts = [
            GPT(
                config,
                groups,
                seed=seed,
                dtype=dtype,
                device=device,
                execution=execution,
                stage=self.partition[index],
            )
            for index in own
        ]
        self.models = nn.ModuleList(self._gpts)
        if config.tie_embeddings and self.schedule.placement == "v" and groups.pp_rank == 0:
            # First and last stage are neighbours here, so they use one table, not two copies.
            first, last = (model.embedding for model in self._gpts)
            if first is not None and last is not None:
                last.word_embeddings = first.word_embeddings
        if grad_dtype is not None:
            for parameter in self.models.parameters():
                parameter.grad_dtype = grad_dtype
        self._parts = [_Part(model, splits=self.schedule.splits) for model in self._gpts]
        self._runs: dict[tuple[int, int, int], Any] = {}

    def canonical_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by canonical name."""
        return {name: p for model in self.models for name, p in model.named_parameters()}

    def parameter_shards(self) -> dict[str, ParameterShard]:
        """What this rank holds of each of its parameters, by canonical name."""
        return {name: s for model in self._gpts for name, s in model.parameter_shards().items()}

    def expert_parameters(self) -> frozenset[str]:
        """Names of this rank's experts' parameters, as for `GPT.expert_parameters`."""
        return frozenset().union(*(model.expert_parameters() for model in self._gpts))

    @property
    def copies(self) -> frozenset[str]:
        """Names of parameters that a stage on another rank owns, counts and saves."""
        held = {model.stage.first for model in self._gpts if model.embedding is not None}
        return frozenset({_TIED}) if held == {False} else frozenset()

    def step(
        self,
        tokens: Tensor,
        labels: Tensor,
        *,
        loss_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        samples: Tensor | None = None,
        cumulative_lengths: Tensor | None = None,
        micro_batches: int | None = None,
        scale: float | Tensor = 1.0,
    ) -> PipelineLoss:
        """Run forward and backward of one batch; every rank calls it with the whole batch.

        Gradients of ``scale * loss_sum`` are added to the parameters' ``grad``; those of a tied
        embedding are summed over its two stages.

        Args:
            tokens: [m b, s] int64 ids.
            labels: [m b, s] int64 ids of the next tokens.
            loss_mask: [m b, s] weight of each token's loss; ones if None.
            position_ids: [m b, s] int64; counted from 0 if None.
            samples: [m b] numbers of the samples, needed if the model has dropout.
            cumulative_lengths: [documents + 1] bounds of the documents in the flattened batch.
            micro_batches: Parts of this batch; those given when the pipeline was built if None.
            scale: Factor of the loss in the backward pass.
        """
        batch = _batch(tokens, labels, loss_mask, position_ids, samples, cumulative_lengths)
        for part in self._parts:
            part.begin(scale)
        before = self._set_tied_gradient(None)
        self._train(tokens, batch, count=micro_batches or self.micro_batches)
        self._sum_tied_gradients()
        tied = self._tied()
        if before is not None and tied is not None and tied.grad is not None:
            tied.grad.add_(before)
        return self._collect(tokens)

    @torch.no_grad()
    def evaluate(
        self,
        tokens: Tensor,
        labels: Tensor,
        *,
        loss_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cumulative_lengths: Tensor | None = None,
        micro_batches: int | None = None,
    ) -> PipelineLoss:
        """Run the forward passes of one batch only; arguments as for `step`.

        ``micro_batches`` may differ from those of training, since no schedule is needed here.
        """
        batch = _batch(tokens, labels, loss_mask, position_ids, None, cumulative_lengths)
        for part in self._parts:
            part.begin(1.0)
        relay(
            {part.model.stage.index: part for part in self._parts},
            self._micro_batches(tokens, batch, count=micro_batches or self.micro_batches),
            owners=self._owners,
            group=self._pp,
            buffer=self._hidden,
        )
        return self._collect(tokens)

    def _train(self, tokens: Tensor, batch: dict[str, Tensor], *, count: int) -> None:
        first, last = (any(getattr(m.stage, end) for m in self._gpts) for end in ("first", "last"))
        # The loss is part of the last stage's forward; the target only makes torch ask for it.
        target = {"target": batch["labels"]} if last else {}
        arguments = (tokens,) if first else ()
        self._schedule_for(tokens, count=count).step(
            *arguments, **target, return_outputs=False, **batch
        )

    def _hidden(self, tokens: Tensor) -> Tensor:
        """Room for a rank's share of the hidden states [b, s, h] of tokens [b, s]."""
        positions = tokens.size(1) // self._gpts[0].sequence_shares
        shape = (tokens.size(0), positions, self.config.hidden_size)
        return torch.empty(shape, dtype=self.dtype, device=tokens.device)

    def _schedule_for(self, tokens: Tensor, *, count: int) -> Any:
        """The schedule for batches of this shape; each shape has its own buffers.

        torch fixes buffers at the first step, and another length would be sent into them silently.
        Where lengths or numbers grow, buffers of the earlier ones are let go.
        """
        key = (_rows(tokens, count=count), tokens.size(1), count)
        if key not in self._runs:
            self.schedule.check_micro_batches(count, pp_size=self.groups.pp_size)
            while len(self._runs) >= _SHAPES_KEPT:
                del self._runs[next(iter(self._runs))]
            stages = [self._torch_stage(part, tokens[: key[0]]) for part in self._parts]
            self._runs[key] = self.schedule.torch_class(
                stages if self.schedule.name not in ("gpipe", "1f1b") else stages[0],
                count,
                loss_fn=self._scaled_loss,
                # The 1 / m is in scale: torch would divide a table shared by two stages twice.
                scale_grads=False,
            )
        return self._runs[key]

    def _scaled_loss(self, loss_sum: Tensor, target: Tensor) -> Tensor:
        del target
        return loss_sum * self._parts[-1].scale

    def _micro_batches(
        self, tokens: Tensor, batch: dict[str, Tensor], *, count: int
    ) -> list[tuple[Tensor, dict[str, Tensor]]]:
        rows = _rows(tokens, count=count)
        slices = [slice(first, first + rows) for first in range(0, tokens.size(0), rows)]
        return [
            (tokens[own], {name: tensor[own] for name, tensor in batch.items()}) for own in slices
        ]

    def _torch_stage(self, part: _Part, tokens: Tensor) -> PipelineStage:
        stage = part.model.stage
        hidden = self._hidden(tokens).requires_grad_()
        precision = torch.promote_types(self.dtype, torch.float32)
        loss = hidden.new_empty((), dtype=precision, requires_grad=True)
        # Shapes are given: torch would find them by a pass over uninitialised memory, whose weight
        # gradients would then be added to those of the first step.
        return PipelineStage(
            part,
            stage.index,
            stage.count,
            tokens.device,
            input_args=(tokens if stage.first else hidden,),
            output_args=(loss if stage.last else hidden,),
            group=self._pp,
            dw_builder=part.gradients.take if part.gradients is not None else None,
        )

    def _tied(self) -> nn.Parameter | None:
        """The table that has a copy on another rank, if this rank holds it."""
        if not self.config.tie_embeddings or self.schedule.placement == "v":
            return None
        return self.canonical_parameters().get(_TIED)

    def _set_tied_gradient(self, gradient: Tensor | None) -> Tensor | None:
        """Put aside the gradient of earlier steps, which has been summed already."""
        tied = self._tied()
        if tied is None:
            return None
        before, tied.grad = tied.grad, gradient
        return before

    def _sum_tied_gradients(self) -> None:
        tied = self._tied()
        if tied is not None and tied.grad is not None:
            dist.all_reduce(tied.grad, group=self.groups.embedding)

    def _collect(self, tokens: Tensor) -> PipelineLoss:
        """Tell every rank the loss that the last stage computed, with every stage's routing."""
        last = next((part for part in self._parts if part.model.stage.last), None)
        precision = torch.promote_types(self.dtype, torch.float32)
        loss_sum = torch.zeros((), dtype=precision, device=tokens.device)
        if own := [value for part in self._parts for value in part.loss_sums]:
            loss_sum = torch.stack(own).sum()
        dist.all_reduce(loss_sum, group=self._pp)
        return PipelineLoss(loss_sum, None if last is None else torch.cat(last.losses))


class _Part(nn.Module):
    """A stage as torch's schedules call it: one positional input, one output tensor."""

    def __init__(self, model: GPT, *, splits: bool) -> None:
        super().__init__()
        self.model = model
        self.gradients: WeightGradients | None = None
        if splits:
            self.gradients = WeightGradients()
            self.gradients.attach(model)
        self.begin(1.0)

    def begin(self, scale: float | Tensor) -> None:
        """Forget the losses of the step before."""
        self.scale = scale
        self.loss_sums: list[Tensor] = []
        self.losses: list[Tensor] = []

    def forward(
        self,
        x: Tensor,
        *,
        position_ids: Tensor,
        labels: Tensor,
        loss_mask: Tensor | None = None,
        samples: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        key = None if samples is None else DropoutKey(seed=self.model.seed, samples=samples)
        hidden, cost = self.model.forward_routed(
            x, position_ids=position_ids, dropout_key=key, documents=documents
        )
        if not self.model.stage.last:
            if cost is None or not self.model.training:
                return hidden
            own_sum = self.model.routing_sum(cost, labels, loss_mask)
            self.loss_sums.append(own_sum.detach())
            # The next stage sends a gradient for the hidden states only.
            return with_loss(hidden, own_sum * self.scale)
        loss = self.model.loss(hidden, labels, loss_mask, routing_cost=cost)
        self.loss_sums.append(loss.loss_sum.detach())
        self.losses.append(loss.losses)
        return loss.loss_sum


def _batch(
    tokens: Tensor,
    labels: Tensor,
    loss_mask: Tensor | None,
    position_ids: Tensor | None,
    samples: Tensor | None,
    cumulative_lengths: Tensor | None,
) -> dict[str, Tensor]:
    """What every stage gets of each micro batch beside its input."""
    if position_ids is None:
        position_ids = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
    batch = {"position_ids": position_ids, "labels": labels}
    if loss_mask is not None:
        batch["loss_mask"] = loss_mask
    if samples is not None:
        batch["samples"] = samples
    if cumulative_lengths is not None:
        batch["documents"] = document_numbers(cumulative_lengths, tokens=tokens)
    for name, tensor in batch.items():
        if tensor.shape[:2] != tokens.shape[: tensor.dim()]:
            raise ValueError(
                f"{name} has the shape {tuple(tensor.shape)}, tokens {tuple(tokens.shape)}; they "
                f"must agree."
            )
    return batch


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
        return balance([1.0] * config.num_layers, count=count)
    layers = sum(len(stage.layers) for stage in stages)
    if len(stages) != count or layers != config.num_layers:
        raise ValueError(
            f"{len(stages)} stages of together {layers} layers were given; this schedule needs "
            f"{count} stages and the model has {config.num_layers} layers."
        )
    return tuple(stages)
