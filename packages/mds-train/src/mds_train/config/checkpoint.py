"""The [checkpoint] table: when to save, what to keep, where to start from."""

from __future__ import annotations

from dataclasses import dataclass

from mds_train.config.checks import require_not_negative, require_positive

__all__ = ["CheckpointConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Saving and loading. Checkpoints of a run lie in RUN_DIR/checkpoints."""

    save_interval: int | None = None
    """Save every so many steps; only at the end when left out."""

    save_initial: bool = False
    """Also save before the first step."""

    save_final: bool = True
    """Save when the run ends."""

    keep_last: int = 3
    """Keep this many newest checkpoints; 0 keeps all of them."""

    keep_every: int | None = None
    """Keep besides every checkpoint whose step is a multiple of this."""

    load: str | None = None
    """Start from this checkpoint: a step-N folder, or a folder of them (the newest whole one)."""

    load_weights_only: bool = False
    """Take only the weights: counters, optimizer, schedule and data start afresh (fine-tuning)."""

    from_scratch_if_missing: bool = False
    """Start from random weights where there is no checkpoint to load or to resume."""

    def __post_init__(self) -> None:
        require_positive("checkpoint.save_interval", self.save_interval)
        require_positive("checkpoint.keep_every", self.keep_every)
        require_not_negative("checkpoint.keep_last", self.keep_last)
        if self.load_weights_only and self.load is None:
            raise ValueError(
                "checkpoint.load_weights_only is set, but checkpoint.load names no checkpoint."
            )
