"""The global batch of a step, and this rank's micro batches of it.

Sample ``n`` of the run is sample ``n`` of the dataset, which shuffles. The global batch after ``c``
consumed samples is ``c ... c + global_batch_size - 1``. It is dealt out micro batch by micro batch,
so however many data-parallel ranks there are, together they see the same samples in each step.
Letters: ``b`` micro batch, ``s`` sequence.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from mds_data import ResumableSampler

__all__ = [
    "BatchReader",
    "Collate",
    "GuardedSamples",
    "MicroBatch",
    "ModelInput",
    "Samples",
    "Sizes",
    "collate",
    "stacked",
]

_FINGERPRINTS = 4
"""Samples that stand for the order: another shuffle hardly leaves one of them in its place."""


class Samples(Protocol):
    """What is needed of a dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Arrays by name, those that the kind of model reads."""


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
        ids = [array for key, array in sample.items() if key.endswith(("tokens", "labels"))]
        largest = max(int(array.max()) for array in ids)
        if largest >= self._vocab_size:
            raise ValueError(
                f"sample {index} holds the token id {largest}, but model.vocab_size is "
                f"{self._vocab_size}; set it to the size of the tokenizer that made the data."
            )
        return sample


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInput:
    """What one forward pass takes; each kind of model has its own.

    The loss of a model is a sum of terms, and each term is a mean over what it counts in the whole
    global batch. ``k`` is the number of terms.

    Attributes:
        labels: [b, s] int64.
        loss_mask: [b, s] fp32, 1 where the loss counts.
        samples: [b] int64, the samples' numbers in the run.
    """

    TERMS: ClassVar[tuple[str, ...]] = ("tokens",)
    """Names of the terms."""

    labels: Tensor
    loss_mask: Tensor
    samples: Tensor

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        return type(self)(
            **{field.name: getattr(self, field.name).to(device) for field in _of(self)}
        )

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """One micro batch after the other, as the rows of one."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})

    def cut(self, length: int) -> Self:
        """The first positions of every sample, where samples can be cut; else the same."""
        del length
        return self

    def counting(self, samples: int) -> Self:
        """The same, but only the first so many samples count."""
        mask = self.loss_mask.clone()
        mask[samples:] = 0.0
        return dataclasses.replace(self, loss_mask=mask)

    @classmethod
    def named(cls, terms: Tensor) -> dict[str, float]:
        """The terms [k] by name; none where the only one is the loss itself."""
        return dict(zip(cls.TERMS, terms.tolist(), strict=True)) if len(cls.TERMS) > 1 else {}

    def arguments(self) -> dict[str, Tensor]:
        """What the model is called with."""
        raise NotImplementedError

    def counts(self) -> Tensor:
        """[k] float64: what each term of the loss is a mean over."""
        return self.loss_mask.double().sum()[None]

    def terms(self, output: Any) -> tuple[Tensor, ...]:
        """The sum of each term over this micro batch, differentiable."""
        return (output.loss_sum,)

    def sums(self, output: Any) -> Tensor:
        """[k] float64: the same, summed exactly and detached."""
        losses: Tensor = output.losses
        return (losses.detach().double() * self.loss_mask).sum()[None]


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch(ModelInput):
    """What a GPT takes.

    Attributes:
        tokens: [b, s] int64.
        position_ids: [b, s] int64.
    """

    tokens: Tensor
    position_ids: Tensor

    def cut(self, length: int) -> Self:
        """The first positions of every sample; the same where it is no longer."""
        if length >= self.tokens.shape[1]:
            return self
        names = [field.name for field in _of(self) if field.name != "samples"]
        parts = {name: getattr(self, name)[:, :length].contiguous() for name in names}
        return type(self)(**parts, samples=self.samples)

    def arguments(self) -> dict[str, Tensor]:
        """What the model is called with."""
        names = ("tokens", "labels", "loss_mask", "position_ids")
        return {name: getattr(self, name) for name in names}


def _of(batch: ModelInput) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(batch)


def stacked(samples: Sequence[Mapping[str, Any]], key: str, dtype: type = np.int64) -> Tensor:
    """One array of every sample as the rows of a tensor."""
    return torch.from_numpy(np.stack([np.asarray(item[key]) for item in samples]).astype(dtype))


def collate(dataset: Samples, numbers: Sequence[int]) -> MicroBatch:
    """Read samples of a GPT and stack them."""
    samples = [dataset[number] for number in numbers]
    return MicroBatch(
        tokens=stacked(samples, "tokens"),
        labels=stacked(samples, "labels"),
        loss_mask=stacked(samples, "loss_mask", np.float32),
        position_ids=stacked(samples, "position_ids"),
        samples=torch.tensor(list(numbers), dtype=torch.int64),
    )


Collate = Callable[[Samples, Sequence[int]], ModelInput]
"""Reads the samples of these numbers and stacks them."""


class BatchReader:
    """Reads this rank's part of one global batch after another, ahead of time if asked to.

    Args:
        dataset: The training samples.
        sizes: Samples of each step.
        micro_batch_size: Samples of one forward pass.
        rank: This data-parallel rank.
        size: Number of data-parallel ranks.
        workers: Threads that read the next batch meanwhile; 0 for none.
        collate: Reads and stacks samples for the kind of model.
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
        collate: Collate = collate,
    ) -> None:
        self._dataset, self._collate = dataset, collate
        self._sizes = sizes
        # The dataset shuffles; the sampler deals out.
        self._make_sampler = functools.partial(
            ResumableSampler,
            global_batch_size=sizes.final,
            micro_batch_size=micro_batch_size,
            rank=rank,
            num_ranks=size,
        )
        self._sampler = self._make_sampler(len(dataset))
        self._pool = ThreadPoolExecutor(workers) if workers else None
        self._ahead: dict[int, list[Future[ModelInput]]] = {}

    def __len__(self) -> int:
        """Samples that can be read."""
        return len(self._dataset)

    def lengthen(self, dataset: Samples) -> None:
        """Read on in a longer dataset, which begins with the same samples."""
        self._dataset, self._sampler = dataset, self._make_sampler(len(dataset))

    def fingerprints(self) -> list[int]:
        """A number for each of the first samples, by which another order is known."""
        first = [self._dataset[number] for number in range(min(_FINGERPRINTS, len(self)))]
        return [
            zlib.crc32(b"".join(np.asarray(sample[key]).tobytes() for key in sorted(sample)))
            for sample in first
        ]

    def read(self, consumed_samples: int) -> list[ModelInput]:
        """This rank's micro batches of the global batch that begins there."""
        if self._pool is None:
            parts = self._parts(consumed_samples)
            return [self._collate(self._dataset, part) for part in parts]
        current = self._ahead.pop(consumed_samples, None) or self._start(consumed_samples)
        following = consumed_samples + self._sizes.at(consumed_samples)
        self._ahead = {following: self._start(following)}
        return [future.result() for future in current]

    def _start(self, first: int) -> list[Future[ModelInput]]:
        if self._pool is None or first + self._sizes.at(first) > len(self._dataset):
            return []
        return [
            self._pool.submit(self._collate, self._dataset, part) for part in self._parts(first)
        ]

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
