"""A model whose stages stand on successive ranks, trained batch by batch.

Shapes: ``b`` micro batch, ``m`` number of micro batches, ``s`` sequence, ``h`` hidden, ``t``
tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mds_core.config import Execution, GPTConfig
from mds_core.config.adapters import AdapterConfig
from mds_core.config.distillation import Distillation
from mds_core.groups import ProcessGroups
from mds_core.models.adapters import add_adapters
from mds_core.models.distilled import check_teachable
from mds_core.models.gpt import GPT
from mds_core.partition import Stage, balance
from mds_core.pipeline.kinds import part_of
from mds_core.pipeline.kinds.gpt import GPTPart
from mds_core.pipeline.lessons import Lessons
from mds_core.pipeline.part import Part, given
from mds_core.pipeline.schedule import schedule_named
from mds_core.pipeline.shared import SharedParameters
from mds_core.pipeline.stage_runs import StageRuns
from mds_core.sharding import ParameterShard

__all__ = ["Pipeline", "PipelineLoss"]


class PipelineLoss(NamedTuple):
    """What a step gives."""

    loss_sum: Tensor
    """Scalar, the masked sum over all micro batches, detached; equal on all ranks."""
    losses: Tensor | None
    """[m b, s] losses of the tokens on the rank of the last stage; None elsewhere."""
    binary_sum: Tensor | None = None
    """Scalar, of a BERT with binary labels the sum of their losses; equal on all ranks."""
    divergences: Tensor | None = None
    """[m b, s] of the tokens from a teacher, with their weight, where ``losses`` are; else None."""


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
        adapters: What is trained in place of a GPT's own parameters; these if None.
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
        adapters: AdapterConfig | None = None,
    ) -> None:
        super().__init__()
        self.config, self.groups, self.seed, self.dtype = config, groups, seed, dtype
        self.schedule, self.micro_batches = schedule_named(schedule), micro_batches
        if groups.pp is None:
            raise ValueError(
                "a pipeline needs pp_size of at least 2; with 1 build the model itself."
            )
        self._kind = part_of(config)
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
        if adapters is not None:
            _adapt(self.models, adapters)
        self._shared = SharedParameters(
            {part.stage.index: part.model for part in self._parts},
            stages=self._kind.shared(config, self.partition),
            owners=self._owners,
            groups=groups,
        )
        if grad_dtype is not None:
            for parameter in self.models.parameters():
                parameter.grad_dtype = grad_dtype
        self._runs = StageRuns(
            parts=self._parts,
            kind=self._kind,
            schedule=self.schedule,
            partition=self.partition,
            owners=self._owners,
            group=groups.pp,
            width=config.hidden_size,
            dtype=dtype,
        )
        self._taught: tuple[Pipeline, Lessons] | None = None
        self.teaching = True
        """Whether a teacher is asked; without it the loss is the plain one."""

    def set_teacher(self, teacher: Pipeline, distillation: Distillation) -> None:
        """Learn from this teacher from now on, as `DistilledGPT` does.

        In each step its stages run first; what leaves the last one stays there for the student's.

        Args:
            teacher: A GPT on the same ranks, in the same schedule.
            distillation: What of the loss is its.

        Raises:
            ValueError: It has another vocabulary or schedule, or one of the two is no GPT.
        """
        parts = [part for part in self._parts if isinstance(part, GPTPart)]
        teachers = [part for part in teacher._parts if isinstance(part, GPTPart)]
        if not parts or not teachers:
            raise ValueError("a teacher and its student are both GPTs; others learn alone.")
        check_teachable(parts[0].model, teachers[0].model)
        if teacher._owners[-1] != self._owners[-1]:
            raise ValueError(
                f"the teacher's last stage is on rank {teacher._owners[-1]} of the pipeline, the "
                f"student's on rank {self._owners[-1]}; give both the same schedule."
            )
        teacher.requires_grad_(requires_grad=False).eval()
        last = next((part.model for part in teachers if part.stage.last), None)
        lessons = Lessons(distillation=distillation, teacher=last)
        for part in parts:
            part.lessons = lessons
        # In a tuple: as a submodule it would be trained, saved and counted.
        self._taught = (teacher, lessons)

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
            samples: [m b] numbers of the samples, needed if the model or its adapters drop.
            micro_batches: Parts of this batch; those given when the pipeline was built if None.
            scale: Factor of the loss in the backward pass; of a BERT with binary labels two, of the
                words' and of the binary loss, of a student of the text's and of the teacher's.
            **inputs: What else the model's ``forward`` takes of a batch, by the same names. Of a
                GPT ``loss_mask``, ``position_ids`` and ``cumulative_lengths``; of a BERT
                ``loss_mask``, ``binary_labels``, ``token_types`` and ``padding_mask``; of a T5
                ``decoder_tokens``, ``loss_mask`` and ``padding_mask``.
        """
        batch = self._prepared(tokens, labels, inputs)
        count = micro_batches or self.micro_batches
        self._ask_teacher(tokens, batch, count=count)
        if samples is not None:
            batch["samples"] = samples
        self._begin(batch, scale)
        before = self._shared.put_aside()
        self._runs.train(tokens, batch, count=count)
        self._shared.sum_gradients()
        self._shared.add(before)
        self._forget_teacher()
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
        stages = {part.stage.index: part for part in self._parts}
        self._runs.relay(stages, tokens, batch, count=micro_batches or self.micro_batches)
        return self._collect(tokens, batch)

    def _ask_teacher(self, tokens: Tensor, batch: dict[str, Tensor], *, count: int) -> None:
        if self._taught is None:
            return
        teacher, lessons = self._taught
        lessons.asked = self.teaching and self.training
        if lessons.asked:
            lessons.known = teacher._last_hidden(tokens, batch, count=count)

    def _forget_teacher(self) -> None:
        if self._taught is not None:
            _, lessons = self._taught
            lessons.asked, lessons.known = False, []

    @torch.no_grad()
    def _last_hidden(self, tokens: Tensor, batch: dict[str, Tensor], *, count: int) -> list[Tensor]:
        """What leaves the last stage's layers, of each micro batch, on its rank."""
        found: list[Tensor] = []

        def through(part: Part, x: Tensor, **shared: Tensor) -> Tensor:
            hidden, _ = part.run(x, shared, None)
            if part.stage.last:
                found.append(hidden)
            return hidden

        stages = {part.stage.index: partial(through, part) for part in self._parts}
        self._runs.relay(stages, tokens, batch, count=count)
        return found

    def _prepared(
        self, tokens: Tensor, labels: Tensor, inputs: dict[str, Tensor | None]
    ) -> dict[str, Tensor]:
        return self._kind.prepared(tokens, {"labels": labels, **given(self._kind, inputs)})

    def _begin(
        self, batch: dict[str, Tensor], scale: float | Tensor | Sequence[float | Tensor]
    ) -> None:
        """Tell the stages the factor of each of the loss's terms."""
        terms = self._parts[0].terms(batch)
        scales = (scale,) * terms if isinstance(scale, (int, float, Tensor)) else tuple(scale)
        if len(scales) != terms:
            raise ValueError(
                f"scale has {len(scales)} factors, but the loss has {terms} "
                f"term{'s' * (terms > 1)}; give one for each, or one number."
            )
        for part in self._parts:
            part.begin(scales)

    def _collect(self, tokens: Tensor, batch: dict[str, Tensor]) -> PipelineLoss:
        """Tell every rank the loss that the last stage computed, with every stage's routing."""
        last = next((part for part in self._parts if part.stage.last), None)
        precision = torch.promote_types(self.dtype, torch.float32)
        terms = self._parts[0].terms(batch)
        sums = torch.zeros(terms, dtype=precision, device=tokens.device)
        if own := [value for part in self._parts for value in part.sums]:
            sums = torch.stack(own).sum(0)
        dist.all_reduce(sums, group=self.groups.pp)
        judged = terms > 1 and self._taught is None
        return PipelineLoss(
            sums[0],
            None if last is None else torch.cat(last.losses),
            sums[1] if judged else None,
            torch.cat(last.divergences) if last is not None and last.divergences else None,
        )


def _adapt(models: nn.ModuleList, adapters: AdapterConfig) -> None:
    gpts = [model for model in models if isinstance(model, GPT)]
    if len(gpts) < len(models):
        raise ValueError(
            "adapters stand beside the layers of a GPT; stages of another model train without."
        )
    for gpt in gpts:
        add_adapters(gpt, adapters)


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
