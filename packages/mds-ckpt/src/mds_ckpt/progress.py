"""Take a checkpoint's progress back: counts, learning-rate schedule, random generators."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.errors import UsageError

__all__ = ["RESETTABLE", "without_progress"]

RESETTABLE = ("counters", "schedule", "rng")
"""What can be set back to the beginning by ``--reset``."""


def without_progress(checkpoint: Checkpoint, what: Collection[str]) -> Checkpoint:
    """The same checkpoint with some of its progress set back to the beginning.

    Args:
        checkpoint: The source.
        what: Words of ``RESETTABLE``; nothing is changed where it is empty.

    Raises:
        UsageError: A word is none of them.
    """
    unknown = [word for word in what if word not in RESETTABLE]
    if unknown:
        raise UsageError(f"'{unknown[0]}' can't be reset; give {', '.join(RESETTABLE)}")
    training = dict(checkpoint.training)
    if "counters" in what:
        checkpoint = replace(checkpoint, step=0, counters={})
        training.pop("data", None)
    if "schedule" in what and "schedule" in training:
        training["schedule"] = _begun(training["schedule"])
    if "rng" in what:
        training.pop("rng", None)
        kept = {key: value for key, value in checkpoint.carried.items() if key != "rng"}
        checkpoint = replace(checkpoint, carried=kept)
    return replace(checkpoint, training=training)


def _begun(schedule: Any) -> dict[str, Any] | None:
    """Megatron's schedule at its beginning; nothing of one whose counts we don't know."""
    if not isinstance(schedule, Mapping) or "num_steps" not in schedule:
        return None
    counts = {key: 0 for key in ("num_steps", "num_tokens") if key in schedule}
    return {**schedule, **counts}
