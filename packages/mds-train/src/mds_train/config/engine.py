"""The [engine] table: what is handed to DeepSpeed beside what follows from the other tables."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """DeepSpeed's JSON is derived from the other tables; here is what may be added."""

    deepspeed_config: str | None = None
    """A DeepSpeed JSON of your own. What it says must agree with the other tables; its settings of
    buffers and reports are passed on."""
