"""Builds what a run needs from its configuration: groups, data, model, engine.

The only place that knows how the five packages fit together; the loop gets finished parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mds_core.groups import Layout, ProcessGroups
from mds_core.models import GPT
from mds_core.sharding import ParameterShard
from mds_data import GPTDataset, TokenStore, open_store
from mds_train.batches import BatchReader, GuardedSamples, Samples
from mds_train.config import TrainConfig
from mds_train.engines.interface import Engine
from mds_train.model_building import build_model
from mds_train.schedule import Schedule

__all__ = ["Parts", "assemble", "choose_device"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Everything that the loop works with."""

    config: TrainConfig
    run_dir: Path
    groups: ProcessGroups
    device: torch.device
    store: TokenStore
    reader: BatchReader
    validation: Samples | None
    shards: dict[str, ParameterShard]
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
        """Stop threads, remove hooks, unmap the store."""
        self.reader.close()
        self.engine.close()
        self.store.close()


def assemble(config: TrainConfig) -> Parts:
    """Build all parts of a run. Every rank calls it with the same configuration.

    Raises:
        ValueError: If data, model and layout do not fit together; the message says what to change.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    config.check_world(world_size)
    device = choose_device(config.train.device)
    groups = _build_groups(config, world_size=world_size)
    store = open_store(Path(config.data.store))
    model = build_model(config, groups, device=device)
    shards = dict(model.parameter_shards())
    return Parts(
        config=config,
        run_dir=Path(config.train.run_dir),
        groups=groups,
        device=device,
        store=store,
        reader=_reader(config, store, groups=groups),
        validation=_validation(config, store),
        shards=shards,
        engine=_engine(model, config, groups=groups, shards=shards),
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


def _build_groups(config: TrainConfig, *, world_size: int) -> ProcessGroups:
    if world_size == 1:
        return ProcessGroups.single()
    parallel = config.parallel
    layout = Layout(
        tp_size=parallel.tp_size,
        pp_size=parallel.pp_size,
        ulysses_size=parallel.ulysses_size,
        dp_size=parallel.dp_size(world_size),
    )
    return ProcessGroups.build(layout, timeout=timedelta(seconds=parallel.timeout_seconds))


def _guarded(dataset: Samples, config: TrainConfig, store: TokenStore) -> Samples:
    """The same samples, checked one by one where the store does not know its vocabulary."""
    if not store.manifest.files and not store.manifest.segments:  # a Megatron pair
        return GuardedSamples(dataset, vocab_size=config.model.vocab_size)
    if store.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"{config.data.store} was made with a vocabulary of {store.vocab_size} tokens, but "
            f"model.vocab_size is {config.model.vocab_size}; set it to {store.vocab_size}."
        )
    return dataset


def _reader(config: TrainConfig, store: TokenStore, *, groups: ProcessGroups) -> BatchReader:
    train = config.train
    dataset = GPTDataset(
        store,
        seq_length=config.data.seq_length,
        num_samples=train.train_steps * train.global_batch_size,
        seed=train.seed,
        split=_split(config, "train"),
        order=config.data.order,
    )
    return BatchReader(
        _guarded(dataset, config, store),
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        rank=groups.dp_rank,
        size=groups.dp_size,
        workers=config.data.workers,
    )


def _validation(config: TrainConfig, store: TokenStore) -> Samples | None:
    if config.watch.eval_interval is None or config.watch.eval_samples == 0:
        return None
    dataset = GPTDataset(
        store,
        seq_length=config.data.seq_length,
        seed=config.train.seed,
        split=_split(config, "valid"),
        order=config.data.order,
    )
    if len(dataset) == 0:
        raise ValueError(
            f"the validation split of {config.data.store} holds no sample of "
            f"{config.data.seq_length} tokens; choose another data.split, shorten data.seq_length "
            f"or leave watch.eval_interval out."
        )
    return _guarded(dataset, config, store)


def _split(config: TrainConfig, name: str) -> str | tuple[str, str]:
    """The store's own split of that name, or the one that data.split asks for."""
    return name if config.data.split is None else (config.data.split, name)


def _engine(
    model: GPT, config: TrainConfig, *, groups: ProcessGroups, shards: dict[str, ParameterShard]
) -> Engine:
    # Imported late: deepspeed takes a second, and the commands that do not train do without it.
    from mds_train.engines.deepspeed import DeepSpeedEngine

    split_names = frozenset(name for name, shard in shards.items() if shard.dim is not None)
    return DeepSpeedEngine(model, config=config, groups=groups, split_names=split_names)
