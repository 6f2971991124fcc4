"""The engine for pipeline stages: torch's schedules run them, DeepSpeed's ZeRO 0 or 1 updates.

A schedule runs forward and backward of all micro batches and sums the gradients of a tied embedding
over its stages. Then DeepSpeed sums them over the replicas and steps, as if it had been one
large micro batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mds_core.groups import ProcessGroups
from mds_core.pipeline import Pipeline, PipelineLoss
from mds_core.sharding import ParameterShard
from mds_train.batches import ModelInput
from mds_train.config import TrainConfig
from mds_train.engines.deepspeed import DeepSpeedEngine, sum_gradients_in_fp32
from mds_train.engines.deepspeed_state import leave_gradients_alone, take_gradients

__all__ = ["PipelineEngine"]


class PipelineEngine(DeepSpeedEngine):
    """Forward, backward and update of this rank's stages.

    Args:
        pipeline: The stages on their device, in the dtype of the precision.
        config: The run.
        groups: This rank's process groups.
        split_names: Canonical names of the parameters that tensor-parallel ranks hold parts of.
        shapes: Global shape of every parameter of the whole model.
        shards: This rank's part of every parameter; for Muon only.
        experts: Names of this rank's experts' parameters, where ranks share out the experts.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        config: TrainConfig,
        groups: ProcessGroups,
        split_names: frozenset[str],
        shapes: Mapping[str, tuple[int, ...]],
        shards: Mapping[str, ParameterShard] | None = None,
        experts: frozenset[str] = frozenset(),
    ) -> None:
        parameters = pipeline.canonical_parameters()
        super().__init__(
            pipeline,
            config=config,
            groups=groups,
            split_names=split_names,
            shapes=shapes,
            shards=shards,
            experts=experts,
            parameters=parameters,
            copies=pipeline.copies,
        )
        self._pipeline = pipeline
        if config.train.precision != "fp32":
            sum_gradients_in_fp32(each for each in parameters.values() if each.requires_grad)
            leave_gradients_alone(self._engine.optimizer)

    def accumulate(self, batch: Sequence[ModelInput], *, weights: Sequence[float]) -> Tensor:
        """Run the schedule over the micro batches; see `Engine.accumulate`."""
        whole = type(batch[0]).joined(batch)
        found = self._pipeline.step(
            **whole.arguments(),
            samples=whole.samples,
            micro_batches=len(batch),
            scale=[weight * self._scale.scale for weight in weights],
        )
        take_gradients(self._engine.optimizer)
        self._engine.allreduce_gradients()
        return self._told(found, whole)

    def losses(self, batch: Sequence[ModelInput]) -> Tensor:
        """Hand the micro batches from stage to stage; see `Engine.losses`."""
        whole = type(batch[0]).joined(batch)
        found = self._pipeline.evaluate(**whole.arguments(), micro_batches=len(batch))
        return self._told(found, whole)

    def _told(self, found: PipelineLoss, batch: ModelInput) -> Tensor:
        """Tell all stages the float64 sums of the losses, which the last one has."""
        total = torch.zeros(len(batch.TERMS), dtype=torch.float64, device=batch.labels.device)
        if found.losses is not None:
            total += batch.sums(found)
        dist.all_reduce(total, group=self._groups.pp)
        return total
