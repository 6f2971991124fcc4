"""Megatron's order of GPT samples, bit for bit, without its compiled helper and its cache files.

Documents are repeated for each epoch and shuffled into one row; samples are stretches of that row;
a second shuffle orders the samples. If the last epoch is used by less than four fifths, it is
shuffled apart. The random numbers are numpy's RandomState, as in the original.
"""

from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["MegatronOrder", "sample_borders"]

_STRETCH = 2**17
"""Documents that are worked on while their lengths are in the processor's cache."""
_LEVELS = 4
"""Of the pyramid of sums; a block has two to this power documents."""


class MegatronOrder:
    """The document, sample and shuffle index of one dataset.

    Args:
        lengths: [sequences] tokens of every sequence of the store.
        first: First sequence of the split.
        stop: End of the split.
        seq_length: Tokens of a sample, without the one more that its last label needs.
        num_samples: Samples wanted; enough whole epochs are laid out. One epoch if None.
        seed: Seed of the shuffles.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        *,
        first: int,
        stop: int,
        seq_length: int,
        num_samples: int | None,
        seed: int,
    ) -> None:
        self._seq_length = seq_length
        epoch = int(lengths[first:stop].sum())
        self.num_epochs = _epochs(epoch, seq_length=seq_length, num_samples=num_samples)
        size = (self.num_epochs * epoch - 1) // seq_length
        before_last = self._before_last_epoch(epoch, num_samples)
        random = np.random.RandomState(seed)
        documents = np.arange(first, stop).astype(np.int32 if stop < 2**31 else np.int64)
        self.doc_index = self._documents(documents, random, apart=before_last is not None)
        self.shuffle_index = _shuffled(
            before_last if before_last is not None else size, size, random
        )
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def _before_last_epoch(self, epoch: int, num_samples: int | None) -> int | None:
        """Samples before the last epoch, if that one is to be shuffled apart."""
        if self.num_epochs == 1 or num_samples is None:
            return None
        before = ((self.num_epochs - 1) * epoch - 1) // self._seq_length
        per_epoch = (epoch - 1) // self._seq_length
        return before if num_samples - before < int(0.80 * per_epoch) else None

    def _documents(
        self, documents: NDArray[Any], random: np.random.RandomState, *, apart: bool
    ) -> NDArray[Any]:
        rows = np.tile(documents, self.num_epochs)
        split = len(documents) * (self.num_epochs - 1) if apart else len(rows)
        random.shuffle(rows[:split])
        if apart:
            random.shuffle(rows[split:])
        return rows

    @cached_property
    def sample_index(self) -> NDArray[np.int64]:
        """[samples + 1, 2] place in `doc_index` and offset in that document of each border."""
        return sample_borders(
            self._lengths, self.doc_index, samples=len(self), seq_length=self._seq_length
        )

    def places(self, number: int) -> tuple[int, int, int]:
        """First place and end in `doc_index` of sample ``number``, and its token to begin with."""
        sample = 2 * self.shuffle_index.item(number)
        first, offset, last, _ = self._borders[sample : sample + 4].tolist()
        return first, last + 1, offset

    def documents(self, number: int) -> tuple[NDArray[Any], int]:
        """The documents that sample ``number`` crosses, [n], and its first token in the first."""
        first, stop, offset = self.places(number)
        return self.doc_index[first:stop], offset

    @cached_property
    def _borders(self) -> NDArray[np.int64]:
        return self.sample_index.ravel()

    def pieces(self, number: int) -> list[tuple[int, int, int]]:
        """Document, first token and end of each piece of sample ``number``, in order."""
        documents, offset = self.documents(number)
        left = self._seq_length + 1
        pieces = []
        for document, length in zip(
            documents.tolist(), self._lengths[documents].tolist(), strict=True
        ):
            pieces.append((document, offset, min(length, offset + left)))
            left -= pieces[-1][2] - offset
            offset = 0
        return pieces


def sample_borders(
    lengths: NDArray[np.int64], documents: NDArray[Any], *, samples: int, seq_length: int
) -> NDArray[np.int64]:
    """[samples + 1, 2] place in ``documents`` and offset there of each border between samples.

    A running sum over all documents would take longer than all of this: blocks of documents are
    summed, borders are counted by block, and each border goes down its block's pyramid of sums.

    Args:
        lengths: [sequences] tokens of each.
        documents: [n] the row: numbers of sequences, one after the other.
        samples: Samples that the row is cut into.
        seq_length: Tokens between two borders.
    """
    index = np.empty((samples + 1, 2), np.int64)
    pyramid = _Pyramid(lengths)
    done = before = 0  # borders found, tokens passed
    for start in range(0, len(documents), _STRETCH):
        levels = pyramid.levels(documents[start : start + _STRETCH])
        ends = np.cumsum(levels[-1], dtype=np.int64) + before
        counts = -(-ends // seq_length)  # borders stand at 0, seq_length, 2 * seq_length, ...
        stop = min(int(counts[-1]), samples + 1)
        blocks = np.repeat(np.arange(len(ends)), np.diff(counts, prepend=done))[: stop - done]
        left = np.arange(done, stop) * seq_length - (ends - levels[-1])[blocks]
        places, offsets = _descend(levels, blocks, left.astype(levels[-1].dtype))
        index[done:stop, 0], index[done:stop, 1] = places + start, offsets
        done, before = stop, int(ends[-1])
    index[0, 0] = 0  # the original starts at the first document even if that is empty
    return index


class _Pyramid:
    """Lengths of documents, sums of two, of four, ... up to blocks; memory is used again."""

    def __init__(self, lengths: NDArray[np.int64]) -> None:
        block = 2**_LEVELS
        dtype = np.int32 if int(lengths.max(initial=0)) * block < 2**31 else np.int64
        self._lengths = lengths.astype(dtype)
        self._buffers = [np.empty(_STRETCH >> level, dtype) for level in range(_LEVELS + 1)]

    def levels(self, documents: NDArray[Any]) -> list[NDArray[Any]]:
        """The levels over some documents, until the next call."""
        count = len(documents)
        size = -(-count >> _LEVELS) << _LEVELS
        levels = [buffer[: size >> level] for level, buffer in enumerate(self._buffers)]
        # wrap: no test of each number
        self._lengths.take(documents, mode="wrap", out=levels[0][:count])
        levels[0][count:] = 0
        for below, above in pairwise(levels):
            np.add(below[::2], below[1::2], out=above)
        return levels


def _descend(
    levels: list[NDArray[Any]], places: NDArray[np.int64], left: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """From blocks and offsets in them to documents and offsets in those; writes into both."""
    for level in levels[-2::-1]:
        places <<= 1
        first = level[places]
        is_beyond = left >= first
        places += is_beyond
        first *= is_beyond
        left -= first
    return places, left


def _epochs(epoch: int, *, seq_length: int, num_samples: int | None) -> int:
    """The least number of epochs whose tokens hold the samples; one more token than they have."""
    if num_samples is None:
        return 1
    return max(1, -(-(num_samples * seq_length + 1) // epoch))


def _shuffled(split: int, size: int, random: np.random.RandomState) -> NDArray[Any]:
    dtype = np.uint32 if size < np.iinfo(np.uint32).max - 1 else np.int64
    index = np.arange(size).astype(dtype)
    random.shuffle(index[:split])
    if split != size:
        random.shuffle(index[split:])
    return index
