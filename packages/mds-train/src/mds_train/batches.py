"""The global batch of a step, and this rank's micro batches of it.

Sample ``n`` of the run is sample ``n`` of the dataset, which shuffles. The global batch after ``c``
consumed samples is ``c ... c + global_batch_size - 1``. It is dealt out micro batch by micro batch,
so however many data-parallel ranks there are, together they see the same samples in each step.
Letters: ``b`` micro batch, ``s`` sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from mds_data import ResumableSampler

__all__ = ["BatchReader", "GuardedSamples", "MicroBatch", "Samples", "Sizes", "collate"]


class Samples(Protocol):
    """What is needed of a dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Arrays [s]: tokens, labels, loss_mask, position_ids."""


class Sizes(Protocol):
    """How large the global batches are."""

    @property
    def final(self) -> int:
        """Size of the last ones."""

    def at(self, consumed_samples: int, /) -> int:
        """Size of the batch that begins after so many samples."""


class GuardedSamples:
    """Samples of a dataset that does not say how large its ids are; too large ones are refused.

    Args:
        dataset: The samples.
        vocab_size: The model's vocabulary.
    """

    def __init__(self, dataset: Samples, *, vocab_size: int) -> None:
        self._dataset, self._vocab_size = dataset, vocab_size

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        sample = self._dataset[index]
        largest = max(int(sample["tokens"].max()), int(sample["labels"].max()))
        if largest >= self._vocab_size:
            raise ValueError(
                f"sample {index} holds the token id {largest}, but model.vocab_size is "
                f"{self._vocab_size}; set it to the size of the tokenizer that made the data."
            )
        return sample


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """What one forward pass takes.

    Attributes:
        tokens: [b, s] int64.
        labels: [b, s] int64.
        loss_mask: [b, s] fp32, 1 where the loss counts.
        position_ids: [b, s] int64.
        samples: [b] int64, the samples' numbers in the run.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    samples: Tensor

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        return type(self)(**{name: getattr(self, name).to(device) for name in self.__slots__})

    def cut(self, length: int) -> Self:
        """The first positions of every sample; the same where it is no longer."""
        if length >= self.tokens.shape[1]:
            return self
        parts = {
            name: getattr(self, name)[:, :length].contiguous()
            for name in self.__slots__
            if name != "samples"
        }
        return type(self)(**parts, samples=self.samples)


def collate(dataset: Samples, numbers: Sequence[int]) -> MicroBatch:
    """Read samples and stack them."""
    samples = [dataset[number] for number in numbers]

    def stack(key: str, dtype: type) -> Tensor:
        return torch.from_numpy(np.stack([np.asarray(item[key]) for item in samples]).astype(dtype))

    return MicroBatch(
        tokens=stack("tokens", np.int64),
        labels=stack("labels", np.int64),
        loss_mask=stack("loss_mask", np.float32),
        position_ids=stack("position_ids", np.int64),
        samples=torch.tensor(list(numbers), dtype=torch.int64),
    )


class BatchReader:
    """Reads this rank's part of one global batch after another, ahead of time if asked to.

    Args:
        dataset: The training samples.
        sizes: Samples of each step.
        micro_batch_size: Samples of one forward pass.
        rank: This data-parallel rank.
        size: Number of data-parallel ranks.
        workers: Threads that read the next batch meanwhile; 0 for none.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        sizes: Sizes,
        micro_batch_size: int,
        rank: int,
        size: int,
        workers: int = 0,
    ) -> None:
        self._dataset = dataset
        self._sizes = sizes
        # The dataset shuffles; the sampler deals out.
        self._sampler = ResumableSampler(
            len(dataset),
            global_batch_size=sizes.final,
            micro_batch_size=micro_batch_size,
            rank=rank,
            num_ranks=size,
        )
        self._pool = ThreadPoolExecutor(workers) if workers else None
        self._ahead: dict[int, list[Future[MicroBatch]]] = {}

    def read(self, consumed_samples: int) -> list[MicroBatch]:
        """This rank's micro batches of the global batch that begins there."""
        if self._pool is None:
            return [collate(self._dataset, part) for part in self._parts(consumed_samples)]
        current = self._ahead.pop(consumed_samples, None) or self._start(consumed_samples)
        following = consumed_samples + self._sizes.at(consumed_samples)
        self._ahead = {following: self._start(following)}
        return [future.result() for future in current]

    def _start(self, first: int) -> list[Future[MicroBatch]]:
        if self._pool is None or first + self._sizes.at(first) > len(self._dataset):
            return []
        return [self._pool.submit(collate, self._dataset, part) for part in self._parts(first)]

    def _parts(self, first: int) -> list[list[int]]:
        size = self._sizes.at(first)
        if first + size > len(self._dataset):
            raise ValueError(
                f"samples {first} to {first + size} are asked for, but the "
                f"dataset was made for {len(self._dataset)}; raise train.train_steps."
            )
        numbers = self._sampler.indices(first, size)
        return [part.tolist() for part in self._sampler.rank_share(numbers)]

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
