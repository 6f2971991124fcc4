"""The [model] table: the shape of a model of mds_core and the family that it belongs to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mds_core.bert_config import BertConfig
from mds_core.config import GPTConfig
from mds_core.t5_config import T5Config
from mds_train.config.checks import require_choice

__all__ = ["FAMILIES", "ModelConfig"]

FAMILIES = ("gpt", "bert", "t5")

_KINDS: dict[str, type[GPTConfig]] = {"gpt": GPTConfig, "bert": BertConfig, "t5": T5Config}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(GPTConfig):
    """Shape of the model: every field of `mds_core.config.GPTConfig`, and what a family adds."""

    family: str = "gpt"
    """Kind of model: "gpt" (Llama-like ones too: rotary positions, rmsnorm, swiglu), "bert", or
    "t5", an encoder and a decoder."""

    num_token_types: int | None = None
    """Of a BERT: kinds of segments that a token can belong to; 2 when left out."""

    binary_head: bool | None = None
    """Of a BERT: a second head says if two segments belong together; true when left out."""

    decoder_num_layers: int | None = None
    """Of a T5: layers of the decoder; as many as the encoder's num_layers when left out."""

    legacy_vocab_softmax: bool = False
    """Padded rows of the vocabulary join the softmax and are trained, as in the original."""

    def __post_init__(self) -> None:
        GPTConfig.__post_init__(self)
        require_choice("model.family", self.family, choices=FAMILIES)
        _check_own_fields(self)
        self.core()  # checks itself

    def core(self, *, tp_size: int = 1) -> GPTConfig:
        """The configuration that mds_core knows, of the family's kind.

        Args:
            tp_size: Of the run; the padded vocabulary, where that is trained, depends on it.
        """
        kind = _KINDS[self.family]
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(kind)}
        core = kind(**{name: value for name, value in values.items() if value is not None})
        if not self.legacy_vocab_softmax:
            return core
        return dataclasses.replace(core, vocab_size=self.padded_vocab_size(tp_size))

    def num_params(self) -> int:
        """Trained numbers of the whole model, over all ranks, with the true vocabulary."""
        if self.family == "gpt":
            return GPTConfig.num_params(self)
        return self.core().num_params()

    def flops_per_token(self, seq_length: int) -> float:
        """Floating-point operations of one training step per token, forward and backward."""
        if self.family == "gpt":
            return GPTConfig.flops_per_token(self, seq_length)
        return self.core().flops_per_token(seq_length)

    def flops_of_sample(self, seq_length: int, *, decoder_seq_length: int | None = None) -> float:
        """Floating-point operations of one training step per sample, forward and backward."""
        core = self.core()
        if isinstance(core, T5Config):
            if decoder_seq_length is None:
                raise ValueError("a T5 reads samples of two lengths; data.decoder_seq_length too.")
            return core.flops_per_sample(seq_length, decoder_length=decoder_seq_length)
        return seq_length * self.flops_per_token(seq_length)


_OWNERS = {"num_token_types": "bert", "binary_head": "bert", "decoder_num_layers": "t5"}


def _check_own_fields(model: ModelConfig) -> None:
    for name, family in _OWNERS.items():
        if getattr(model, name) is not None and model.family != family:
            raise ValueError(
                f"model.{name} is a {family}'s, but model.family is {model.family!r}; leave it "
                f'out, or set model.family = "{family}".'
            )
