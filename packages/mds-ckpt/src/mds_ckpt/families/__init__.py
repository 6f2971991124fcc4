"""Families of models: canonical names and shapes against those of transformers.

To add a family, write one file with a :class:`~mds_ckpt.families.rule.Family` and name it in
``ALL`` below. Its ``rules`` list every tensor of a model once; what is not listed is refused on the
way in and missing on the way out, so a forgotten tensor can't pass unseen.
"""

from __future__ import annotations

from mds_ckpt.families.gpt2 import GPT2
from mds_ckpt.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from mds_ckpt.families.rule import Family
from mds_ckpt.manifest import ModelRecord

__all__ = ["ALL", "Family", "choose", "family_of"]

ALL = (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3)


def family_of(model_type: str) -> Family | None:
    """The family of transformers' ``model_type``."""
    return next((family for family in ALL if family.name == model_type), None)


def choose(model: ModelRecord, *, prefer: str | None = None) -> Family:
    """The family that can express ``model``.

    Args:
        model: The model.
        prefer: The family that it came from, which wins if it still fits.

    Raises:
        ValueError: If there is none; the message says what the nearest one lacks.
    """
    if model.family != "gpt":
        raise ValueError(f"models of family '{model.family}' have no counterpart in transformers")
    ordered = sorted(ALL, key=lambda family: family.name != prefer)
    faults = {family.name: family.faults(model) for family in ordered}
    for family in ordered:
        if not faults[family.name]:
            return family
    nearest = min(faults.values(), key=len)
    raise ValueError(f"no family of transformers is like this model: {'; '.join(nearest)}")
