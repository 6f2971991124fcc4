"""What an encoder and a decoder read: spans cut out of a text, or pairs of a translation, stacked.

Letters: ``b`` micro batch, ``s`` encoder sequence, ``r`` decoder sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mds_train.batches import ModelInput, Samples, stacked

__all__ = ["SourceAndTarget", "collate_source_and_target"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceAndTarget(ModelInput):
    """What a T5 takes; ``labels`` and ``loss_mask`` are the decoder's, [b, r].

    Attributes:
        tokens: [b, s] int64, the encoder's.
        decoder_tokens: [b, r] int64.
        padding_mask: [b, s] int64, 1 where the encoder has a token.
    """

    tokens: Tensor
    decoder_tokens: Tensor
    padding_mask: Tensor

    def arguments(self) -> dict[str, Tensor]:
        """What the model is called with."""
        names = ("tokens", "decoder_tokens", "labels", "loss_mask", "padding_mask")
        return {name: getattr(self, name) for name in names}


def collate_source_and_target(dataset: Samples, numbers: Sequence[int]) -> SourceAndTarget:
    """Read samples of an encoder and a decoder and stack them."""
    samples = [dataset[number] for number in numbers]
    return SourceAndTarget(
        tokens=stacked(samples, "encoder_tokens"),
        decoder_tokens=stacked(samples, "decoder_tokens"),
        # -1 in the padding is no token.
        labels=stacked(samples, "labels").clamp(min=0),
        loss_mask=stacked(samples, "loss_mask", np.float32),
        padding_mask=stacked(samples, "encoder_padding_mask"),
        samples=torch.tensor(list(numbers), dtype=torch.int64),
    )
