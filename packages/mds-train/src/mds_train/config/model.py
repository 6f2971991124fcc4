"""The [model] table: mds_core's GPT configuration and the family that it belongs to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mds_core.config import GPTConfig
from mds_train.config.checks import require_choice

__all__ = ["FAMILIES", "ModelConfig"]

FAMILIES = ("gpt",)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(GPTConfig):
    """Shape of the model. Every field of `mds_core.config.GPTConfig`, and the family."""

    family: str = "gpt"
    """Kind of model. Llama-like models are "gpt" with rotary positions, rmsnorm and swiglu."""

    legacy_vocab_softmax: bool = False
    """Padded rows of the vocabulary join the softmax and are trained, as in the original."""

    def __post_init__(self) -> None:
        GPTConfig.__post_init__(self)
        require_choice("model.family", self.family, choices=FAMILIES)

    def core(self, *, tp_size: int = 1) -> GPTConfig:
        """The configuration that mds_core knows: this one without the family.

        Args:
            tp_size: Of the run; the padded vocabulary, where that is trained, depends on it.
        """
        fields = dataclasses.fields(GPTConfig)
        core = GPTConfig(**{field.name: getattr(self, field.name) for field in fields})
        if not self.legacy_vocab_softmax:
            return core
        return dataclasses.replace(core, vocab_size=self.padded_vocab_size(tp_size))
