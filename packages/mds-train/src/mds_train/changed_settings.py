"""Which settings a resumed run has otherwise than its checkpoint, of those that can change it.

What would make it another run is refused elsewhere; the rest is the user's to change, and said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["changed_settings"]

_TABLES = ("model", "train", "optimizer", "schedule", "parallel", "memory", "fp16", "lora")
_INDIFFERENT = frozenset(
    {
        "parallel.timeout_seconds",
        "schedule.override",
        "train.device",
        "train.exit_interval",
        "train.exit_minutes",
        "train.exit_step",
        "train.kill_switch_file",
        "train.max_skipped_steps",
        "train.run_dir",
        "train.skip_train",
    }
)
"""Settings that say where and how long a run is at work, not what it computes."""


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """A sentence that names every change with both values; empty where there is none.

    Args:
        saved: The configuration in the checkpoint's manifest, by table; older ones lack some keys.
        now: The configuration of the run.
    """
    changes = [
        f"{table}.{key} {_shown(old[key])} -> {_shown(value)}"
        for table in _TABLES
        if isinstance(old := saved.get(table), Mapping)
        for key, value in now[table].items()
        if f"{table}.{key}" not in _INDIFFERENT and key in old and _shown(old[key]) != _shown(value)
    ]
    return f"Changed since the checkpoint: {'; '.join(changes)}." if changes else ""


def _shown(value: object) -> str:
    """As JSON has it, for which a tuple is a list."""
    return json.dumps(value)
