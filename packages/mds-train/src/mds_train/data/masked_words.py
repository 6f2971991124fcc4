"""What a BERT reads: samples with masked words and two segments, stacked.

Letters: ``b`` micro batch, ``s`` sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from mds_train.batches import ModelInput, Samples, stacked

__all__ = ["MaskedWords", "SegmentedWords", "collate_segments", "collate_words"]

_NOT_COUNTED = -100  # what torch's cross entropy passes over


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedWords(ModelInput):
    """What a BERT without a binary head takes.

    Attributes:
        tokens: [b, s] int64.
        token_types: [b, s] int64, the segment of each token.
        padding_mask: [b, s] int64, 1 where a token is.
    """

    TERMS: ClassVar[tuple[str, ...]] = ("words",)

    tokens: Tensor
    token_types: Tensor
    padding_mask: Tensor

    def arguments(self) -> dict[str, Tensor]:
        """What the model is called with."""
        names = ("tokens", "labels", "loss_mask", "token_types", "padding_mask")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentedWords(MaskedWords):
    """What a BERT with a binary head takes. Its loss is a mean over words and one over samples.

    Attributes:
        binary_labels: [b] int64, 1 where the segments were swapped or are no neighbours.
    """

    TERMS: ClassVar[tuple[str, ...]] = ("words", "binary")

    binary_labels: Tensor

    def counting(self, samples: int) -> Self:
        """The same, but only the first so many samples count."""
        mask, labels = self.loss_mask.clone(), self.binary_labels.clone()
        mask[samples:], labels[samples:] = 0.0, _NOT_COUNTED
        return dataclasses.replace(self, loss_mask=mask, binary_labels=labels)

    def arguments(self) -> dict[str, Tensor]:
        """What the model is called with."""
        return {**MaskedWords.arguments(self), "binary_labels": self.binary_labels}

    def counts(self) -> Tensor:
        """[2] float64: masked words, samples."""
        samples = (self.binary_labels != _NOT_COUNTED).double().sum()
        return torch.stack([self.loss_mask.double().sum(), samples])

    def terms(self, output: Any) -> tuple[Tensor, ...]:
        """The sums of the words' and of the binary head's losses."""
        return output.loss_sum, output.binary_sum

    def sums(self, output: Any) -> Tensor:
        """[2] float64: the same, detached."""
        words = (output.losses.detach().double() * self.loss_mask).sum()
        return torch.stack([words, output.binary_sum.detach().double()])


def collate_words(dataset: Samples, numbers: Sequence[int]) -> MaskedWords:
    """Read samples of one segment and stack them."""
    return MaskedWords(**_words([dataset[number] for number in numbers], numbers))


def collate_segments(dataset: Samples, numbers: Sequence[int]) -> SegmentedWords:
    """Read samples of two segments and stack them."""
    samples = [dataset[number] for number in numbers]
    return SegmentedWords(**_words(samples, numbers), binary_labels=stacked(samples, "is_random"))


def _words(samples: Sequence[Any], numbers: Sequence[int]) -> dict[str, Tensor]:
    padding_mask = stacked(samples, "padding_mask")
    return {
        "tokens": stacked(samples, "tokens"),
        # -1 where nothing is predicted is no token.
        "labels": stacked(samples, "labels").clamp(min=0),
        "loss_mask": stacked(samples, "loss_mask", np.float32),
        # As in the original, padding has its own id as type, which need not be one.
        "token_types": stacked(samples, "token_types") * padding_mask,
        "padding_mask": padding_mask,
        "samples": torch.tensor(list(numbers), dtype=torch.int64),
    }
