"""The [data] table: which tokens, cut how, in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mds_train.config.checks import require_choice, require_not_negative, require_positive

__all__ = ["DataConfig", "Order"]

Order = Literal["fast", "megatron"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the tokens lie and how they become samples."""

    store: str
    """Folder of an mds-data store, or the prefix of a Megatron .bin/.idx pair."""

    seq_length: int
    """Tokens of one sample; the model sees this many positions."""

    split: str | None = None
    """Weights of train, validation and test, like "95,5,0"; the store's own when left out."""

    order: Order = "fast"
    """How samples are shuffled: "fast" (computed) or "megatron" (the original's order)."""

    workers: int = 0
    """Threads that read ahead while the model works; 0 reads when a batch is needed."""

    def __post_init__(self) -> None:
        if not self.store:
            raise ValueError("data.store is empty; name the folder that mds-data preprocess wrote.")
        require_positive("data.seq_length", self.seq_length)
        require_choice("data.order", self.order, choices=("fast", "megatron"))
        require_not_negative("data.workers", self.workers)
        if self.split is not None:
            _check_split(self.split)


def _check_split(split: str) -> None:
    try:
        weights = [float(part) for part in split.split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or min(weights) < 0 or sum(weights) <= 0:
        raise ValueError(
            f"data.split is {split!r}, but it must be up to three weights for train, "
            f'validation and test, like "95,5,0".'
        )
