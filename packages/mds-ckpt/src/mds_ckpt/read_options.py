"""What a user can say where a checkpoint leaves a fact open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mds_ckpt.tensors.qkv import Layout

if TYPE_CHECKING:
    from mds_ckpt.encryption.keys import KeySource

__all__ = ["ReadOptions", "Replicated"]

Replicated = Literal["assert", "first", "average"]
"""Copies of one parameter must be equal, or the first is taken, or their mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """Answers to questions that some formats leave open; the defaults answer none."""

    vocab_size: int | None = None
    """The true vocabulary; padding rows behind it are left out."""
    qkv_layout: Layout | None = None
    """Row order of fused query, key and value weights; None detects it."""
    replicated: Replicated = "assert"
    model: Mapping[str, int | float | str] = field(default_factory=dict)
    """Facts of the model that its files don't hold, by the configuration's field names."""
    key: KeySource | None = None
    """Where the key of an encrypted checkpoint comes from; others need none."""
    expect: str | None = None
    """SHA-256 that the (plain) manifest of an mds checkpoint must have."""
    adapter: Path | None = None
    """Folder of a LoRA adapter, as the peft library keeps it, that is added to the weights."""
