"""What a student's stages know of its teacher, whose own stages have run before them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from mds_core.config.distillation import Distillation
from mds_core.models.gpt import GPT

__all__ = ["Lessons"]


@dataclass(kw_only=True, slots=True)
class Lessons:
    """One for all stages of a rank."""

    distillation: Distillation
    teacher: GPT | None
    """Its last stage, where that is on this rank."""
    asked: bool = False
    """Whether the teacher says something to this batch."""
    known: list[Tensor] = field(default_factory=list)
    """What left the teacher's last stage, [b, s, h] of each micro batch, where that is here."""
