"""What a layout asks of the model and the data. Each check names the settings that clash."""

from __future__ import annotations

from mds_train.config.data import DataConfig
from mds_train.config.model import ModelConfig
from mds_train.config.parallel import ParallelConfig

__all__ = [
    "check_expert_shares",
    "check_micro_batches",
    "check_sequence_shares",
    "check_stages",
    "check_whole_heads",
]


def check_whole_heads(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Tensor-parallel ranks share out heads whole, and ulysses ranks what each of them has.

    Raises:
        ValueError: If the former do not divide, or the latter are too few.
    """
    tp_size, heads = parallel.tp_size, model.num_attention_heads
    if heads % tp_size:
        raise ValueError(
            f"parallel.tp_size {tp_size} does not divide model.num_attention_heads {heads}; each "
            f"rank needs whole heads."
        )
    try:
        model.check_tp(tp_size)
    except ValueError as error:
        raise ValueError(f"parallel.tp_size: {error}") from error
    if parallel.in_a_ring:  # each rank keeps its positions of all heads
        return
    try:
        model.check_ulysses(parallel.ulysses_size, tp_size=tp_size)
    except ValueError as error:
        raise ValueError(f"parallel.ulysses_size: {error}") from error


def check_sequence_shares(data: DataConfig, parallel: ParallelConfig) -> None:
    """Ranks that share a sequence hold equally many of its positions.

    Raises:
        ValueError: If data.seq_length does not divide.
    """
    shares, names = parallel.ulysses_size, f"parallel.ulysses_size {parallel.ulysses_size}"
    if parallel.in_a_ring and data.seq_length % (2 * shares):
        raise ValueError(
            f"data.seq_length {data.seq_length} is not a multiple of {2 * shares}, twice {names}: "
            f'with parallel.sequence_sharing "ring" each rank holds a stretch of either half. '
            f"Change one of them."
        )
    if parallel.sequence_parallel:
        shares *= parallel.tp_size
        names += f" * tp_size {parallel.tp_size} (parallel.sequence_parallel)"
    if data.seq_length % shares:
        raise ValueError(
            f"data.seq_length {data.seq_length} is not a multiple of {names}: the ranks that share "
            f"a sequence hold equal parts of it. Change one of them."
        )


def check_expert_shares(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Ranks that share out experts take equally many, and tensor-parallel ranks cut them evenly.

    Raises:
        ValueError: If they do not divide.
    """
    split = parallel.tp_size if parallel.expert_tensor_parallel else 1
    try:
        model.check_expert_parallel(parallel.ep_size, tp_size=split)
    except ValueError as error:
        raise ValueError(f"parallel.ep_size, parallel.tp_size: {error}") from error


def check_stages(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Every stage of a pipeline has layers, and all layers are on stages.

    Raises:
        ValueError: If they do not share out.
    """
    if parallel.pp_size == 1:
        return
    stages = f"{parallel.stage_count} stages (parallel.pp_size {parallel.pp_size}"
    stages += f', parallel.schedule "{parallel.pipeline_schedule}")'
    sizes, layers = parallel.stage_sizes, model.core().stacked_layers
    named = f"model.num_layers {model.num_layers}"
    if model.family == "t5":
        named += f" + decoder_num_layers {layers - model.num_layers}"
    if sizes is None and layers < parallel.stage_count:
        raise ValueError(f"{named} are too few for {stages}; each needs a layer.")
    if sizes is not None and (len(sizes), sum(sizes)) != (parallel.stage_count, layers):
        raise ValueError(
            f'parallel.partition "{parallel.partition}" gives {len(sizes)} stages together '
            f"{sum(sizes)} layers, but there are {stages} and {named}."
        )
    if parallel.split_rank is not None:
        _check_split(parallel.split_rank, model, parallel)


def _check_split(split: int, model: ModelConfig, parallel: ParallelConfig) -> None:
    """Both stacks have a layer for each of their ranks."""
    decoder = model.core().stacked_layers - model.num_layers
    for name, layers, ranks in (
        ("model.num_layers", model.num_layers, split),
        ("model.decoder_num_layers", decoder, parallel.pp_size - split),
    ):
        if layers < ranks:
            raise ValueError(
                f"{name} {layers} are too few for the {ranks} ranks that parallel.split_rank "
                f"{split} of pp_size {parallel.pp_size} gives them; each needs a layer."
            )


def check_micro_batches(parallel: ParallelConfig, *, count: int) -> None:
    """A pipeline's schedule can run the micro batches of a step.

    Args:
        parallel: The layout.
        count: Micro batches of one replica in a step.

    Raises:
        ValueError: If there are too few, or they do not make whole rounds.
    """
    if parallel.pp_size == 1:
        return
    from mds_core.pipeline.schedule import schedule_named  # with torch, which takes a second

    schedule = schedule_named(parallel.pipeline_schedule)
    try:
        schedule.check_micro_batches(count, pp_size=parallel.pp_size)
    except ValueError as error:
        raise ValueError(
            f"{error} They are train.global_batch_size / (train.micro_batch_size * data-parallel "
            f"ranks)."
        ) from error
