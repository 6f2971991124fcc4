"""Builds what a run needs from its configuration: groups, data, model, engine.

The only place that knows how the five packages fit together; the loop gets finished parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist

from mds_core.groups import Layout, ProcessGroups
from mds_core.models import GPT
from mds_core.pipeline import Pipeline
from mds_core.sharding import ParameterShard
from mds_kernels import BackendError, check_ranks_agree
from mds_train.batches import BatchReader, Collate, Samples
from mds_train.config import TrainConfig
from mds_train.config.batch_growth import BatchSizes
from mds_train.data.building import Stores, open_stores, training_samples, validation_samples
from mds_train.data.families import collate_of
from mds_train.engines.interface import Engine
from mds_train.errors import MachineError
from mds_train.model_building import (
    Model,
    build_model,
    global_shapes,
    parameter_dtype,
    trained_shards,
)
from mds_train.schedule import Schedule
from mds_train.stage_timing import measured_costs

__all__ = ["Parts", "assemble", "choose_device"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Everything that the loop works with."""

    config: TrainConfig
    run_dir: Path
    groups: ProcessGroups
    device: torch.device
    stores: Stores
    reader: BatchReader
    validation: Samples | None
    collate: Collate
    """How samples become a micro batch of the model's family."""

    shards: dict[str, ParameterShard]
    """What this rank holds of each of its trained parameters."""

    shapes: dict[str, tuple[int, ...]]
    """Global shape of every trained parameter of the model, on all pipeline stages."""

    engine: Engine
    schedule: Schedule

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.run_dir / "checkpoints"

    @property
    def degrees(self) -> dict[str, int]:
        """The layout, for reports and manifests."""
        groups = self.groups
        return {
            "tp": groups.tp_size,
            "pp": groups.pp_size,
            "dp": groups.dp_size,
            "ulysses": groups.ulysses_size,
            "ep": groups.ep_size,
            "zero_stage": self.config.parallel.zero_stage,
        }

    def close(self) -> None:
        """Stop threads, remove hooks, unmap the stores."""
        self.reader.close()
        self.engine.close()
        self.stores.close()


Fill: TypeAlias = Callable[[Model | Pipeline, TrainConfig, ProcessGroups], None]
"""Writes into a new model, before an engine cuts it."""


def assemble(config: TrainConfig, *, fill: Fill | None = None) -> Parts:
    """Build all parts of a run. Every rank calls it with the same configuration.

    Args:
        config: The run.
        fill: Gives the model's frozen weights their values, where some are.

    Raises:
        ValueError: If data, model and layout do not fit together; the message says what to change.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    config.check_world(world_size)
    device = choose_device(config.train.device)
    groups = _build_groups(config, world_size=world_size)
    if world_size > 1:
        _check_kernels(config, device=device)
    stores = open_stores(config)
    costs = None
    if groups.pp_size > 1 and config.parallel.partition == "time":
        costs = measured_costs(config, groups, device=device)
    model = build_model(config, groups, device=device, stage_costs=costs)
    if fill is not None:
        fill(model, config, groups)
    shards, shapes = trained_shards(model), global_shapes(config)
    return Parts(
        config=config,
        run_dir=Path(config.train.run_dir),
        groups=groups,
        device=device,
        stores=stores,
        reader=_reader(config, stores, groups=groups),
        validation=validation_samples(config, stores),
        collate=collate_of(config),
        shards=shards,
        shapes=shapes,
        engine=_engine(model, config, groups=groups, shards=shards, shapes=shapes),
        schedule=Schedule.from_config(config),
    )


def choose_device(wish: str) -> torch.device:
    """The device of this rank: "auto" takes cuda where there is one.

    Raises:
        ValueError: If cuda is asked for and there is none.
    """
    if wish == "cpu" or (wish == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError('train.device is "cuda", but torch sees no CUDA device; use "cpu".')
    return torch.device("cuda", torch.cuda.current_device())


def _check_kernels(config: TrainConfig, *, device: torch.device) -> None:
    """Other kernels on one rank give other roundings, and weights that should be equal drift apart.

    Raises:
        MachineError: Naming the kernel and the ranks.
    """
    world = dist.group.WORLD
    assert world is not None
    try:
        check_ranks_agree(device=device.type, dtype=parameter_dtype(config), group=world)
    except BackendError as error:
        raise MachineError(str(error)) from error


def _build_groups(config: TrainConfig, *, world_size: int) -> ProcessGroups:
    if world_size == 1:
        return ProcessGroups.single()
    parallel = config.parallel
    layout = Layout(
        tp_size=parallel.tp_size,
        pp_size=parallel.pp_size,
        ulysses_size=parallel.ulysses_size,
        dp_size=parallel.dp_size(world_size),
        ep_size=parallel.ep_size,
    )
    return ProcessGroups.build(layout, timeout=timedelta(seconds=parallel.timeout_seconds))


def _reader(config: TrainConfig, stores: Stores, *, groups: ProcessGroups) -> BatchReader:
    return BatchReader(
        training_samples(config, stores),
        sizes=BatchSizes.from_config(config.train),
        micro_batch_size=config.train.micro_batch_size,
        rank=groups.dp_rank,
        size=groups.dp_size,
        workers=config.data.workers,
        collate=collate_of(config),
    )


def _engine(
    model: Model | Pipeline,
    config: TrainConfig,
    *,
    groups: ProcessGroups,
    shards: dict[str, ParameterShard],
    shapes: dict[str, tuple[int, ...]],
) -> Engine:
    # Imported late: deepspeed takes a second, and the commands that do not train do without it.
    from mds_train.engines.deepspeed import DeepSpeedEngine
    from mds_train.engines.pipeline import PipelineEngine

    split_names = frozenset(name for name, shard in shards.items() if not shard.whole)
    experts: frozenset[str] = frozenset()
    if groups.ep_size > 1 and isinstance(model, (GPT, Pipeline)):
        experts = model.expert_parameters()
    engine = PipelineEngine if isinstance(model, Pipeline) else DeepSpeedEngine
    return engine(
        model,  # type: ignore[arg-type]
        config=config,
        groups=groups,
        split_names=split_names,
        shapes=shapes,
        shards=shards,
        experts=experts,
    )
