"""Builds the model of a run as its configuration says: shape, layout, precision, recomputation."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import nn

from mds_core.config import Execution
from mds_core.groups import ProcessGroups
from mds_core.models import GPT, T5, Bert, DistilledGPT, add_adapters
from mds_core.partition import Stage, balance, balance_split, parameter_costs, stages_of
from mds_core.pipeline import Pipeline
from mds_core.sharding import ParameterShard
from mds_train.config import TrainConfig

__all__ = [
    "Model",
    "build_model",
    "build_undivided",
    "execution_of",
    "global_shapes",
    "parameter_dtype",
    "parameters_of",
    "stages",
    "trained_shards",
]

logger = logging.getLogger(__name__)


Model: TypeAlias = GPT | Bert | T5
"""A model that is not divided into pipeline stages."""

_KINDS: Mapping[str, type[Model]] = MappingProxyType({"gpt": GPT, "bert": Bert, "t5": T5})


def build_model(
    config: TrainConfig,
    groups: ProcessGroups,
    *,
    device: torch.device,
    stage_costs: Sequence[float] | None = None,
) -> Model | Pipeline:
    """The model of a run with its start values: this rank's part of it.

    Args:
        config: The run.
        groups: This rank's process groups.
        device: Where the parameters lie.
        stage_costs: What each layer costs where parallel.partition is "time".
    """
    if config.parallel.sequence_parallel and groups.tp_size == 1:
        logger.warning(
            "parallel.sequence_parallel does nothing: parallel.tp_size is 1, so nobody shares."
        )
    if config.parallel.sequence_sharing == "ring" and groups.ulysses_size == 1:
        logger.warning(
            'parallel.sequence_sharing "ring" does nothing: parallel.ulysses_size is 1, so nobody '
            "shares a sequence."
        )
    if groups.pp_size > 1:
        return _build_pipeline(config, groups, device=device, costs=stage_costs)
    return build_undivided(config, groups, device=device)


def build_undivided(
    config: TrainConfig, groups: ProcessGroups, *, device: torch.device | str
) -> Model:
    """The model of the run's family without pipeline stages; on "meta" without memory."""
    kind = DistilledGPT if config.distill.teacher else _KINDS[config.model.family]
    model: Model = kind(
        config.model.core(tp_size=config.parallel.tp_size),  # type: ignore[arg-type]
        groups,
        seed=config.train.seed,
        dtype=parameter_dtype(config),
        device=device,
        execution=execution_of(config),
    )
    if config.lora.adapters is not None and isinstance(model, GPT):
        add_adapters(model, config.lora.adapters)
    return model


def parameters_of(model: Model | Pipeline) -> dict[str, nn.Parameter]:
    """This rank's parameters by canonical name, whether they are trained or rest."""
    if isinstance(model, Pipeline):
        return model.canonical_parameters()
    return dict(model.named_parameters())


def trained_shards(model: Model | Pipeline) -> dict[str, ParameterShard]:
    """What this rank holds of each parameter that is trained; beside adapters all others rest."""
    parameters = parameters_of(model)
    shards = model.parameter_shards()
    return {name: shard for name, shard in shards.items() if parameters[name].requires_grad}


def _build_pipeline(
    config: TrainConfig,
    groups: ProcessGroups,
    *,
    device: torch.device,
    costs: Sequence[float] | None,
) -> Pipeline:
    train, parallel = config.train, config.parallel
    found = stages(config, costs=costs)
    if costs is not None:
        sizes = ", ".join(str(len(stage.layers)) for stage in found)
        logger.info("By the time that layers take the stages hold %s of them.", sizes)
    return Pipeline(
        config.model.core(tp_size=config.parallel.tp_size),
        groups,
        micro_batches=train.global_batch_size // (train.micro_batch_size * groups.dp_size),
        schedule=parallel.pipeline_schedule,
        chunks=parallel.stage_count // parallel.pp_size,
        stages=found,
        seed=train.seed,
        dtype=parameter_dtype(config),
        device=device,
        execution=execution_of(config),
        adapters=config.lora.adapters,
    )


def stages(config: TrainConfig, *, costs: Sequence[float] | None = None) -> tuple[Stage, ...]:
    """The layers of each pipeline stage, as parallel.partition says.

    Args:
        config: The run.
        costs: What partition "time" has measured; layers count alike where nothing was.
    """
    parallel, model = config.parallel, config.model
    if parallel.stage_sizes is not None:
        found = stages_of(parallel.stage_sizes)
    else:
        core = model.core()
        if parallel.partition == "parameters":
            costs = parameter_costs(core)
        elif parallel.partition == "layers" or costs is None:
            costs = (1.0,) * core.stacked_layers
        if parallel.split_rank is None:
            found = balance(costs, count=parallel.stage_count)
        else:
            counts = parallel.split_rank, parallel.pp_size - parallel.split_rank
            found = balance_split(costs, counts=counts, at=model.num_layers)
    if parallel.ep_size > 1:
        _check_experts_everywhere(config, found)
    return found


def _check_experts_everywhere(config: TrainConfig, found: Sequence[Stage]) -> None:
    """The stages' ranks sum norms together, so each must have experts where ranks share them out.

    Raises:
        ValueError: Naming a stage that has none.
    """
    for stage in found:
        if not any(config.model.experts[layer] for layer in stage.layers):
            raise ValueError(
                f"parallel.ep_size {config.parallel.ep_size} needs layers with experts on every "
                f"pipeline stage, but stage {stage.index} (layers {list(stage.layers)}) has none; "
                f"use fewer stages, another parallel.partition, or ep_size 1."
            )


def global_shapes(config: TrainConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every trained parameter of the whole model, in its order."""
    model = build_undivided(config, ProcessGroups.single(), device="meta")
    return {name: shard.global_shape for name, shard in trained_shards(model).items()}


def execution_of(config: TrainConfig) -> Execution:
    """How the model computes."""
    memory = config.memory
    return Execution(
        sequence_parallel=config.parallel.sequence_parallel,
        expert_tensor_parallel=config.parallel.expert_tensor_parallel,
        recompute=memory.recompute,  # type: ignore[arg-type]
        recompute_layers=memory.recompute_layers,
        recompute_modules=memory.recompute_modules,  # type: ignore[arg-type]
        offload_activations=memory.offload_activations,
        sequence_sharing="ring" if config.parallel.in_a_ring else "ulysses",
        sequence_chunk=memory.sequence_chunk,
    )


def parameter_dtype(config: TrainConfig) -> torch.dtype:
    """What the model computes with."""
    return _DTYPES[config.train.precision]


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
