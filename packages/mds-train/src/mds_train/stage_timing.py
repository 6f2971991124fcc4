"""Measures what the layers of a run take on its ranks, for parallel.partition "time"."""

from __future__ import annotations

import torch
from torch import Tensor

from mds_core.groups import ProcessGroups
from mds_core.pipeline import layer_seconds
from mds_train.config import TrainConfig
from mds_train.model_building import execution_of, parameter_dtype

__all__ = ["measured_costs"]


def measured_costs(
    config: TrainConfig, groups: ProcessGroups, *, device: torch.device
) -> tuple[float, ...]:
    """Seconds of every layer for one micro batch, the same on all ranks. Collective."""
    return layer_seconds(
        config.model.core(tp_size=config.parallel.tp_size),
        groups,
        _some_batch(config, device=device),
        dtype=parameter_dtype(config),
        execution=execution_of(config),
    )


def _some_batch(config: TrainConfig, *, device: torch.device) -> dict[str, Tensor]:
    """A micro batch of the run's shape; what stands in it does not matter."""
    rows, data, family = config.train.micro_batch_size, config.data, config.model.family

    def ids(length: int) -> Tensor:
        return torch.randint(config.model.vocab_size, (rows, length), device=device)

    tokens = ids(data.seq_length)
    batch = {"tokens": tokens, "samples": torch.arange(rows, device=device)}
    if family == "t5":
        assert data.decoder_seq_length is not None  # the configuration has checked it
        words = ids(data.decoder_seq_length)
        return {**batch, "decoder_tokens": words, "labels": words}
    if family == "bert" and config.model.binary_head is not False:
        batch["binary_labels"] = torch.zeros(rows, dtype=torch.int64, device=device)
    return {**batch, "labels": tokens}
