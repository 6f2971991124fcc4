"""A pretrained BERT with a new head, and how its samples become tensors.

Shapes: ``b`` samples, ``c`` rows of a sample (the answers to choose from, else 1), ``s`` tokens,
``o`` outputs of the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mds_ckpt import Checkpoint
from mds_core import BertConfig, ProcessGroups
from mds_core.models import Bert
from mds_core.rng import DropoutKey
from mds_train.errors import InputError
from mds_train.generate.model import fill

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Classifier", "Encoder", "Sample", "load_classifier"]

# Heads of the pretraining have no part in it; a pooler may have to be learned anew.
_NOT_NEEDED = ("lm_head.", "output_layer.", "binary_head.")
_MAY_LACK = (*_NOT_NEEDED, "pooler.")


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample as the model reads it."""

    rows: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Tokens and their segments, a row for each answer to choose from."""
    label: float


class Encoder:
    """Makes rows of texts, with the marks that the tokenizer's own template puts around them.

    Args:
        tokenizer: Of the model; its tokenizer.json must say how pairs are joined.
        length: Most tokens of a row.
        cut: What is shortened: the longer text, or the first (an article).
    """

    def __init__(self, tokenizer: Tokenizer, *, length: int, cut: str = "longest_first") -> None:
        self._tokenizer = tokenizer
        tokenizer.no_padding()
        if len(set(tokenizer.encode("a", "b").type_ids)) != 2:
            raise InputError(
                "The tokenizer.json has no template for pairs of texts ([CLS] A [SEP] B [SEP]); "
                "take that of the BERT."
            )
        tokenizer.enable_truncation(max_length=length, strategy=cut)

    def row(self, first: str, second: str | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens and segments of one text or a pair."""
        pair = (first,) if second is None else (first, second)
        encoded = self._tokenizer.encode(*pair)
        return tuple(encoded.ids), tuple(encoded.type_ids)


class Classifier(nn.Module):
    """Scores from the pooled vector of a BERT.

    Args:
        trunk: The BERT.
        outputs: Of the head.
        dropout: Before the head.
        seed: Of the head's start values and of dropout.
    """

    def __init__(self, trunk: Bert, *, outputs: int, dropout: float, seed: int) -> None:
        super().__init__()
        self.trunk, self.dropout, self.seed = trunk, dropout, seed
        for name, parameter in trunk.named_parameters():
            if name.startswith(_NOT_NEEDED):
                parameter.requires_grad = False
        device = next(trunk.parameters()).device
        self.head = nn.Linear(trunk.config.hidden_size, outputs, device=device)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            start = torch.randn(self.head.weight.shape, generator=generator)
            self.head.weight.copy_(start * trunk.config.init_std)
            self.head.bias.zero_()

    def forward(self, samples: Sequence[Sample], *, numbers: Tensor | None = None) -> Tensor:
        """Score samples.

        Args:
            samples: b of them, each with c rows.
            numbers: [b] of the samples in the order of training, for dropout.

        Returns:
            [b, o], or [b, c] where there are answers to choose from.
        """
        rows = [row for sample in samples for row in sample.rows]
        choices = len(samples[0].rows)
        tokens, types, mask = self._tensors(rows)
        key = None
        if numbers is not None:
            each = numbers.repeat_interleave(choices) * choices
            order = each + torch.arange(choices).repeat(len(samples))
            key = DropoutKey(seed=self.seed, samples=order)
        pooled = self.trunk.pooled(
            tokens, token_types=types, padding_mask=mask, dropout_key=key if self.training else None
        )
        scores: Tensor = self.head(F.dropout(pooled, self.dropout, training=self.training))
        return scores.view(len(samples), choices) if choices > 1 else scores

    def _tensors(
        self, rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, segments and which are no filling, each [b c, s]."""
        device = self.head.weight.device
        longest = max(len(tokens) for tokens, _ in rows)

        def filled(values: Sequence[Sequence[int]]) -> Tensor:
            whole = [[*each, *[0] * (longest - len(each))] for each in values]
            return torch.tensor(whole, device=device)

        tokens, types = zip(*rows, strict=True)
        mask = filled([[1] * len(each) for each in tokens]).bool()
        return filled(tokens), filled(types), mask


def load_classifier(
    checkpoint: Checkpoint,
    *,
    outputs: int,
    dropout: float,
    seed: int,
    device: torch.device | str = "cpu",
) -> Classifier:
    """A pretrained BERT with a new head.

    Args:
        checkpoint: of a BERT, in any format that mds_ckpt opens.
        outputs: of the head.
        dropout: inside the BERT and before the head.
        seed: of what is new, and of dropout.
        device: where it goes.

    Raises:
        InputError: If the checkpoint is not a BERT, or lacks a parameter.
    """
    if "num_token_types" not in checkpoint.config:
        raise InputError(f"{checkpoint.path}: not a BERT; GLUE and RACE are fine-tuned from one.")
    config = replace(
        BertConfig.from_record(checkpoint.config),
        binary_head=True,
        hidden_dropout=dropout,
        attention_dropout=dropout,
    )
    trunk = Bert(config, ProcessGroups.single(), seed=seed, device=device)
    fill(trunk, checkpoint, may_lack=_MAY_LACK)
    return Classifier(trunk, outputs=outputs, dropout=dropout, seed=seed)
