"""What `mds-train run --dry-run` says: how large a run would be, from real data and a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mds_train.config import TrainConfig
from mds_train.watch.throughput import short_number

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["describe_run"]


def describe_run(config: TrainConfig, *, world_size: int) -> Table:
    """Open the data, build the model without memory, and return what a run would be.

    Args:
        config: the run.
        world_size: number of ranks that were started.

    Raises:
        ValueError: If configuration, data and ranks do not go together.
    """
    from rich.table import Table

    config.check_world(world_size)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in (
        *_model_rows(config),
        *_data_rows(config),
        *_memory_rows(config, world_size=world_size),
    ):
        table.add_row(name, value)
    return table


def _model_rows(config: TrainConfig) -> list[tuple[str, str]]:
    from mds_train.model_building import global_shapes

    flops, tensors = config.flops_per_token, len(global_shapes(config))
    return [
        ("parameters", f"{config.model.num_params():,} in {tensors} tensors"),
        ("FLOPs a token", f"{short_number(flops)} (forward and backward)"),
    ]


def _data_rows(config: TrainConfig) -> list[tuple[str, str]]:
    from mds_train.config.batch_growth import BatchSizes
    from mds_train.config.length_growth import SequenceLengths
    from mds_train.data.building import epoch_lengths, open_stores

    stores = open_stores(config)
    epoch = sum(epoch_lengths(config, stores))
    steps, sizes = config.train.train_steps, BatchSizes.from_config(config.train)
    epochs = sizes.consumed_after(steps) / max(1, epoch)
    tokens = SequenceLengths.from_config(config.data).tokens_of(steps, sizes=sizes)
    tokens += sizes.consumed_after(steps) * (config.data.decoder_seq_length or 0)
    return [
        *(
            ("documents", f"{len(store):,} in {path}")
            for path, store in zip(config.data.paths, stores.training, strict=True)
        ),
        ("samples an epoch", f"{epoch:,} of {config.data.tokens_of_sample} tokens"),
        (
            "this run",
            f"{config.train.train_steps} steps, {epochs:.2f} epochs, {short_number(tokens)} tokens",
        ),
    ]


def _memory_rows(config: TrainConfig, *, world_size: int) -> list[tuple[str, str]]:
    from mds_train.plan.memory import plan_memory

    memory = plan_memory(config, world_size=world_size, on_cpu=_is_on_cpu(config))
    parallel = config.parallel
    sizes = [f"tp {parallel.tp_size}", f"dp {parallel.dp_size(world_size)}"]
    if parallel.pp_size > 1:
        sizes.insert(1, f"pp {parallel.pp_size} ({parallel.pipeline_schedule})")
    if parallel.ulysses_size > 1:
        sizes.append(f"ulysses {parallel.ulysses_size}")
    layout = (
        f"{world_size} ranks: {', '.join(sizes)}, ZeRO {parallel.zero_stage}, "
        f"{config.train.precision}"
    )
    return [
        ("layout", layout),
        ("weights", _size(memory.weights)),
        ("gradients", _size(memory.gradients)),
        ("optimizer", _size(memory.optimizer)),
        ("activations", _size(memory.activations)),
        ("head", f"about {_size(memory.head)}"),
        ("buffers", f"about {_size(memory.buffers)}"),
        ("or, when gradients are summed", f"about {_size(memory.summing)}"),
        ("memory of a rank", f"about {_size(memory.total)}"),
    ]


def _is_on_cpu(config: TrainConfig) -> bool:
    import torch

    return config.train.device == "cpu" or not torch.cuda.is_available()


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
