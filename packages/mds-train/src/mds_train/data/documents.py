"""Micro batches of a GPT whose samples hold several documents that do not see each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from mds_train.batches import MicroBatch, Samples, stacked

__all__ = ["DocumentBatch", "collate_documents"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentBatch(MicroBatch):
    """What a GPT takes that looks at one document at a time.

    Attributes:
        cumulative_lengths: [documents + 1] int64, bounds of the documents in the flattened batch,
            from 0 to b s.
    """

    cumulative_lengths: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """One micro batch after the other; bounds go on where those of the one before end."""
        ends = np.cumsum([0, *(part.tokens.numel() for part in parts)]).tolist()
        starts = [
            part.cumulative_lengths[:-1] + end for part, end in zip(parts, ends, strict=False)
        ]
        bounds = torch.cat([*starts, parts[0].cumulative_lengths.new_tensor([ends[-1]])])
        names = [field.name for field in dataclasses.fields(MicroBatch)]
        rows = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return cls(**rows, cumulative_lengths=bounds)

    def cut(self, length: int) -> Self:
        """The same: the configuration lets no samples be cut that are marked so."""
        del length
        return self

    def arguments(self) -> dict[str, Tensor]:
        """What the model is called with."""
        # Not super(): slots make a new class, which the closure of super() does not know.
        return MicroBatch.arguments(self) | {"cumulative_lengths": self.cumulative_lengths}


def collate_documents(dataset: Samples, numbers: Sequence[int]) -> DocumentBatch:
    """Read samples and stack them, with the bounds of all their documents."""
    samples = [dataset[number] for number in numbers]
    length = len(samples[0]["tokens"])
    starts = [
        np.asarray(sample["cumulative_lengths"][:-1], dtype=np.int64) + place * length
        for place, sample in enumerate(samples)
    ]
    bounds = np.concatenate([*starts, [len(samples) * length]])
    return DocumentBatch(
        tokens=stacked(samples, "tokens"),
        labels=stacked(samples, "labels"),
        loss_mask=stacked(samples, "loss_mask", np.float32),
        position_ids=stacked(samples, "position_ids"),
        samples=torch.tensor(list(numbers), dtype=torch.int64),
        cumulative_lengths=torch.from_numpy(bounds),
    )
