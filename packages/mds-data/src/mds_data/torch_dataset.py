"""Feed torch: tensors instead of arrays, and a DataLoader. Needs the extra ``[torch]``."""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mds_data.datasets.blended import SampleSource
from mds_data.sampling.sampler import ResumableSampler

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

__all__ = ["TorchDataset", "data_loader", "window_loader"]

_TOKENS_SENT = 2**17
_LARGEST_GROUP = 8
"""Micro batches of windows that a worker sends at once, unless they are large."""


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise ImportError("torch tensors need torch: pip install 'mds-data[torch]'") from None


class TorchDataset:
    """A dataset of this package, seen as a map-style dataset of torch.

    One sample is a dictionary of tensors. A whole batch, as a DataLoader asks for it, is one
    dictionary of stacked tensors, so that a worker sends few large things instead of many small.
    """

    def __init__(self, dataset: SampleSource) -> None:
        _torch()
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> "dict[str, torch.Tensor]":
        """One sample; every value is a tensor of its own."""
        torch = _torch()
        sample = self.dataset[number]
        return {name: torch.from_numpy(values.copy()) for name, values in sample.items()}

    def __getitems__(self, numbers: Sequence[int]) -> "dict[str, torch.Tensor]":
        """[b, ...] the stacked samples; ``cumulative_lengths`` are those of the flat batch."""
        return _stacked([self.dataset[number] for number in numbers])


def _stacked(samples: Sequence[Mapping[str, Any]]) -> "dict[str, torch.Tensor]":
    torch = _torch()
    return {name: torch.from_numpy(_column(samples, name)) for name in samples[0]}


def _column(samples: Sequence[Mapping[str, Any]], name: str) -> NDArray[Any]:
    """[b, ...] one value of all samples; borders of documents run on through the flat batch."""
    values = [sample[name] for sample in samples]
    if name != "cumulative_lengths":
        return np.stack(values)
    shifts = np.cumsum([0, *(borders[-1] for borders in values[:-1])])
    moved = [borders[1:] + shift for borders, shift in zip(values, shifts, strict=True)]
    return np.concatenate([[0], *moved]).astype(np.int32)


class _Windows:
    """A plain GPT dataset as a map-style dataset that gives whole batches of windows, as stored.

    A worker then sends one small tensor instead of four: tokens, labels, mask and positions of a
    window are made where they are needed.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> "torch.Tensor":
        return self.__getitems__([number])

    def __getitems__(self, numbers: Sequence[int]) -> "torch.Tensor":
        """[b, s + 1] ids in the store's type; 16-bit ids are sent as the same bits, signed."""
        size = len(self.dataset)
        for number in numbers:
            if not 0 <= number < size:
                raise IndexError(f"sample {number} of {size}")
        rows = [self.dataset.window_beyond(number) for number in numbers]
        ids = np.stack(rows)  # sources of one blend may differ in type
        batch: torch.Tensor = _torch().from_numpy(
            ids.view(np.int16) if ids.dtype == np.uint16 else ids.astype(np.int32, copy=False)
        )
        return batch


def _sample_of_windows(windows: "torch.Tensor") -> "dict[str, torch.Tensor]":
    """The tensors [b, s] that the samples of the windows [b, s + 1] stack to."""
    torch = _torch()
    rows, size = windows.shape[0], windows.shape[1] - 1
    return {
        "tokens": _ids(windows[:, :-1]),
        "labels": _ids(windows[:, 1:]),
        "loss_mask": torch.ones(rows, size, dtype=torch.float32),
        "position_ids": torch.arange(size).repeat(rows, 1),
    }


def _ids(windows: "torch.Tensor") -> "torch.Tensor":
    """The ids as int64, in a tensor of their own."""
    kinds = _torch()
    ids = windows.to(kinds.int64, memory_format=kinds.contiguous_format)
    if windows.dtype == kinds.int16:
        ids.bitwise_and_(0xFFFF)
    return ids


def _as_it_is(batch: Any) -> Any:
    return batch


def data_loader(
    dataset: SampleSource,
    sampler: ResumableSampler,
    *,
    num_workers: int = 0,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
) -> "DataLoader[Any]":
    """A torch DataLoader that yields this rank's micro batches without end.

    Args:
        dataset: A dataset of this package.
        sampler: Decides the batches; call its ``advance`` after each step.
        num_workers: Processes that read ahead.
        pin_memory: Put batches into page-locked memory.
        prefetch_factor: Batches that each worker reads ahead.

    Returns:
        A loader of dictionaries of [micro_batch_size, ...] tensors.
    """
    _torch()
    # Windows are cheaper to send, but what is made of them afterwards is not page-locked.
    if num_workers > 0 and not pin_memory and getattr(dataset, "is_plain", False):
        return _loader_of_windows(
            dataset,
            sampler,
            finish=_sample_of_windows,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
        )
    loader: DataLoader[Any] = importlib.import_module("torch.utils.data").DataLoader(
        TorchDataset(dataset),
        batch_sampler=sampler,
        num_workers=num_workers,
        pin_memory=pin_memory,
        collate_fn=_as_it_is,
        prefetch_factor=prefetch_factor,
        persistent_workers=num_workers > 0,
    )
    return loader


def window_loader(
    dataset: SampleSource,
    sampler: ResumableSampler,
    *,
    num_workers: int = 0,
    prefetch_factor: int | None = None,
) -> "DataLoader[Any]":
    """A torch DataLoader that yields this rank's micro batches as windows, [b, s + 1] int64.

    Tokens are ``windows[:, :-1]`` and labels ``windows[:, 1:]``; a loop that needs no more is
    spared masks and positions.

    Args:
        dataset: A `GPTDataset`, or a blend of such, without masks of documents and infilling.
        sampler: Decides the batches; call its ``advance`` after each step.
        num_workers: Processes that read ahead.
        prefetch_factor: Batches that each worker reads ahead.

    Raises:
        ValueError: Samples of the dataset are more than their windows.
    """
    _torch()
    if not getattr(dataset, "is_plain", False):
        raise ValueError(
            "only samples of a GPTDataset (or a blend of such) without masks of documents and "
            "infilling are windows and nothing more; use data_loader"
        )
    return _loader_of_windows(
        dataset,
        sampler,
        finish=_ids,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
    )


class _Groups:
    """A sampler's micro batches, some at a time: a worker then sends fewer and larger things."""

    def __init__(self, sampler: ResumableSampler, count: int) -> None:
        self.sampler = sampler
        self.count = count

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(self.sampler)
        while group := list(chain.from_iterable(islice(batches, self.count))):
            yield group


def _group_size(dataset: Any, sampler: ResumableSampler, *, prefetch_factor: int | None) -> int:
    """Micro batches that are sent at once; half of what is read ahead at most."""
    size = len(dataset.window_beyond(0)) * sampler.micro_batch_size
    most = _LARGEST_GROUP if prefetch_factor is None else min(_LARGEST_GROUP, prefetch_factor // 2)
    return max(1, min(most, _TOKENS_SENT // size))


def _loader_of_windows(
    dataset: Any,
    sampler: ResumableSampler,
    *,
    finish: Callable[[Any], Any],
    num_workers: int,
    prefetch_factor: int | None,
) -> "DataLoader[Any]":
    """A DataLoader whose workers send windows, which the process that asks for them finishes."""
    data: Any = importlib.import_module("torch.utils.data")
    count = _group_size(dataset, sampler, prefetch_factor=prefetch_factor) if num_workers else 1

    class WindowLoader(data.DataLoader):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            for windows in super().__iter__():
                yield from map(finish, windows.split(sampler.micro_batch_size))

    loader: DataLoader[Any] = WindowLoader(
        _Windows(dataset),
        batch_sampler=_Groups(sampler, count),
        num_workers=num_workers,
        collate_fn=_as_it_is,
        prefetch_factor=None if prefetch_factor is None else -(-prefetch_factor // count),
        persistent_workers=num_workers > 0,
    )
    return loader
