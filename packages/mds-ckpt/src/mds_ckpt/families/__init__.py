"""Families of models: canonical names and shapes against those of transformers.

To add a family, write one file with a :class:`~mds_ckpt.families.rule.Family` and name it in
``ALL`` below. Its ``rules`` list every tensor of a model once; what is not listed is refused on the
way in and missing on the way out, so a forgotten tensor can't pass unseen.
"""

from __future__ import annotations

from types import MappingProxyType

from mds_ckpt.families.bert import BERT, MEGATRON_BERT
from mds_ckpt.families.bloom import BLOOM
from mds_ckpt.families.gpt2 import GPT2
from mds_ckpt.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from mds_ckpt.families.mixtral import MIXTRAL
from mds_ckpt.families.neox import NEOX
from mds_ckpt.families.rule import Family
from mds_ckpt.manifest import ModelRecord

__all__ = ["ALL", "UNLIKE", "Family", "choose", "family_of"]

ALL = (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, NEOX, BLOOM, BERT, MEGATRON_BERT)

_T5 = (
    "transformers' T5 has a table of relative positions, RMS norms, no biases and unscaled "
    "attention; Megatron's T5 has learned positions, layer norms, biases and scaled attention, so "
    "neither holds the other"
)
UNLIKE = MappingProxyType({"t5": _T5, "mt5": _T5, "umt5": _T5})
"""Model types, of transformers or ours, that have no counterpart, and why."""

_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")


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
    alike = [family for family in ALL if family.kind == model.family]
    if not alike:
        why = UNLIKE.get(model.family)
        kind = f"models of family '{model.family}' have no counterpart in transformers"
        raise ValueError(why or kind)
    missing = [name for name in _NEEDED if model.config.get(name) is None]
    if missing:
        raise ValueError(f"the checkpoint does not say its {', '.join(missing)}")
    ordered = sorted(alike, key=lambda family: family.name != prefer)
    faults = {family.name: family.faults(model) for family in ordered}
    for family in ordered:
        if not faults[family.name]:
            return family
    nearest = min(faults.values(), key=len)
    raise ValueError(f"no family of transformers is like this model: {'; '.join(nearest)}")
