"""Fixed-length samples of running text for a decoder: documents joined, then cut.

Shapes: ``s`` is ``seq_length``. A sample needs ``s + 1`` ids, and its last id is the first of the
next one.
"""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mds_data.datasets.fim import FillInTheMiddle
from mds_data.datasets.megatron_order import MegatronOrder
from mds_data.datasets.sentences import sentence_table
from mds_data.sampling.permutation import EpochOrder, mix
from mds_data.store.selection import DocumentRow, document_range
from mds_data.store.token_store import TokenStore

__all__ = ["GPTDataset"]

_INT64 = np.dtype(np.int64)
"""Numpy takes a type object quicker than a type."""
_ROWS_KEPT = 2**22
"""Documents, repeats counted, whose places are kept in the order of reading: 64 MiB."""


class GPTDataset:
    """Samples of ``seq_length`` tokens from a store, in an order that the seed computes.

    ``order="fast"`` keeps documents where they lie and permutes the windows; each epoch cuts at
    other places. ``order="megatron"`` is the original's order for the same seed, sequence length,
    split and number of samples, bit for bit.

    Args:
        store: An open store.
        seq_length: Tokens of a sample.
        num_samples: How many samples there are, over as many epochs as that takes; None is one
            epoch. In Megatron's order whole epochs are laid out, so ``len`` may be larger.
        seed: Chooses the order.
        split: Megatron's split string and "train", "valid" or "test"; the name of a split that the
            manifest keeps; or None for all documents.
        order: ``"fast"`` or ``"megatron"``.
        eod_mask_loss: Don't train on what follows an end-of-document id.
        reset_position_ids: Count positions from 0 again after each end-of-document id.
        reset_attention_mask: Add ``cumulative_lengths``, the borders of documents in the sample.
        fill_in_the_middle: Rearrange some documents of each sample for infilling; `window` still
            gives them as stored.

    Raises:
        ValueError: The split holds no tokens, or an argument can't be.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        seq_length: int,
        num_samples: int | None = None,
        seed: int = 1234,
        split: tuple[str, str] | str | None = None,
        order: Literal["fast", "megatron"] = "fast",
        eod_mask_loss: bool = False,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        fill_in_the_middle: FillInTheMiddle | None = None,
    ) -> None:
        if seq_length < 1 or (num_samples is not None and num_samples < 0):
            raise ValueError(
                f"seq_length ({seq_length}) must be positive and num_samples ({num_samples}) "
                f"not negative"
            )
        if order not in ("fast", "megatron"):
            raise ValueError(f"order must be 'fast' or 'megatron', not {order!r}")
        needs_eod = eod_mask_loss or reset_position_ids or reset_attention_mask
        if needs_eod and store.eod_id is None:
            raise ValueError(
                f"{store.path}: has no end-of-document id, which masks and positions are reset by; "
                f"preprocess with --append-eod"
            )
        self.store = store
        self.seq_length = seq_length
        self.seed = seed
        self.split = split
        self._ones = np.ones(seq_length, np.float32)
        self._positions = np.arange(seq_length, dtype=np.int64)
        self._marks_documents = needs_eod
        self._eod_mask_loss = eod_mask_loss
        self._reset_position_ids = reset_position_ids
        self._reset_attention_mask = reset_attention_mask
        self._fill_in = fill_in_the_middle
        self._window: _FastWindows | _MegatronWindows
        if order == "fast":
            self._window = _FastWindows(store, split, seq_length=seq_length, seed=seed)
            self._length = self._window.per_epoch if num_samples is None else num_samples
        else:
            self._window = _MegatronWindows(
                store, split, seq_length=seq_length, num_samples=num_samples, seed=seed
            )
            self._length = len(self._window.order)

    def __len__(self) -> int:
        return self._length

    @property
    def megatron_order(self) -> MegatronOrder:
        """The original's document, sample and shuffle index; only with ``order="megatron"``."""
        if isinstance(self._window, _MegatronWindows):
            return self._window.order
        raise ValueError("only order='megatron' has Megatron's indices")

    def window(self, number: int) -> NDArray[Any]:
        """[s + 1] the ids of a sample, as stored; don't write into them."""
        return self._window.read(self._place(number))

    def __getitem__(self, number: int) -> dict[str, NDArray[Any]]:
        """``tokens`` and ``labels`` [s] int64, ``loss_mask`` [s] float32, ``position_ids`` [s]."""
        return self._sample(self._place(number))

    def beyond(self, number: int) -> dict[str, NDArray[Any]]:
        """Sample ``number`` of the order without end, past ``len`` too.

        The fast order goes on with further epochs, Megatron's begins again.
        """
        is_fast = isinstance(self._window, _FastWindows)
        return self._sample(number if is_fast else number % self._length)

    @property
    def is_plain(self) -> bool:
        """Whether a sample is its window and nothing more, so that a batch can be made of those."""
        return not self._marks_documents and self._fill_in is None

    def window_beyond(self, number: int) -> NDArray[Any]:
        """[s + 1] the window of ``beyond(number)``; don't write into it."""
        is_fast = isinstance(self._window, _FastWindows)
        return self._window.read(number if is_fast else number % self._length)

    def _place(self, number: int) -> int:
        place = number + self._length if number < 0 else number
        if not 0 <= place < self._length:
            raise IndexError(f"sample {number} of {self._length}")
        return place

    def _sample(self, place: int) -> dict[str, NDArray[Any]]:
        ids = self._window.read(place).astype(_INT64)
        if self._fill_in is not None:
            random = np.random.default_rng(mix(self.seed, place, 4))
            ids = self._fill_in.rearranged(ids, eod_id=self.store.eod_id, random=random)
        sample: dict[str, NDArray[Any]] = {
            "tokens": ids[:-1],
            "labels": ids[1:].copy(),  # who masks one leaves the other
            "loss_mask": self._ones.copy(),
            "position_ids": self._positions.copy(),
        }
        if self._marks_documents:
            self._mark_documents(sample)
        return sample

    @property
    def tokens_per_sample(self) -> int:
        """Tokens that a sample trains on."""
        return self.seq_length

    def _mark_documents(self, sample: dict[str, NDArray[Any]]) -> None:
        ends = np.flatnonzero(sample["tokens"] == self.store.eod_id)
        if self._eod_mask_loss:
            sample["loss_mask"][ends] = 0.0
        borders = np.concatenate([[0], ends + 1])
        if self._reset_position_ids:
            inner = borders[borders < self.seq_length]
            lengths = np.diff(np.append(inner, self.seq_length))
            sample["position_ids"] -= np.repeat(inner, lengths)
        if self._reset_attention_mask:
            cumulative = np.unique(np.append(borders, self.seq_length))
            sample["cumulative_lengths"] = cumulative.astype(np.int32)


class _FastWindows:
    """Windows of the documents as they lie, permuted by computation."""

    def __init__(
        self,
        store: TokenStore,
        split: tuple[str, str] | str | None,
        *,
        seq_length: int,
        seed: int,
    ) -> None:
        first, stop = document_range(store, split)
        self._row = DocumentRow(store, first=first, stop=stop)
        _check_filled(store, split, documents=stop - first, tokens=self._row.length)
        self._seq_length = seq_length
        self._seed = seed
        self.per_epoch = max(1, (self._row.length - 1) // seq_length)
        self._order = EpochOrder(self.per_epoch, seed=seed)

    def read(self, number: int) -> NDArray[Any]:
        """[s + 1] ids, as stored."""
        epoch, place = self._order.locate(number)
        start = place * self._seq_length
        if epoch:  # other borders in each epoch, so that other tokens stand together
            start += mix(self._seed, epoch, 1) % self._seq_length
        return self._row.read(start, start + self._seq_length + 1)


class _MegatronWindows:
    """Windows in the original's order; sentences count as its documents where a store has them."""

    def __init__(
        self,
        store: TokenStore,
        split: tuple[str, str] | str | None,
        *,
        seq_length: int,
        num_samples: int | None,
        seed: int,
    ) -> None:
        table = sentence_table(store)  # the original's index counts sentences as its documents
        starts, lengths = table.start, table.length
        first, stop = document_range(store, split, count=len(lengths))
        tokens = int(lengths[first:stop].sum())
        _check_filled(store, split, documents=stop - first, tokens=tokens)
        self._seq_length = seq_length
        self._store = store
        self.order = MegatronOrder(
            lengths,
            first=first,
            stop=stop,
            seq_length=seq_length,
            num_samples=num_samples,
            seed=seed,
        )
        # Start and length of each in one item of 16 bytes: taking one array costs half of two.
        self._table = np.stack([starts, lengths], axis=1).view(np.complex128).ravel()
        documents = self.order.doc_index
        # In the order of reading they lie side by side: a tenth off the time of a sample.
        self._rows = (
            self._table.take(documents).view(_INT64) if len(documents) <= _ROWS_KEPT else None
        )

    def read(self, number: int) -> NDArray[Any]:
        """[s + 1] ids, as stored."""
        left = self._seq_length + 1
        read = self._store.tokens
        parts = []
        each = iter(self._stretches(number))
        for start, length in zip(each, each, strict=True):
            count = length if length < left else left
            if count:
                parts.append(read(start, start + count))
                left -= count
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _stretches(self, number: int) -> list[int]:
        """Start and length of what is left of each document that a sample crosses, in turn."""
        first, stop, offset = self.order.places(number)
        pairs: list[int]
        if self._rows is not None:
            pairs = self._rows[2 * first : 2 * stop].tolist()
        else:
            documents = self.order.doc_index[first:stop]
            pairs = self._table.take(documents).view(_INT64).tolist()
        pairs[0] += offset
        pairs[1] -= offset
        return pairs


def _check_filled(
    store: TokenStore, split: tuple[str, str] | str | None, *, documents: int, tokens: int
) -> None:
    if tokens < 2:
        part = "" if split is None else f" in split {split!r}"
        if isinstance(split, tuple):
            part = f" in part {split[1]!r} of the split {split[0]}"
        raise ValueError(
            f"{store.path}: holds {tokens} tokens in {documents} documents{part}, and a sample "
            f"needs at least 2; give the part a larger share"
        )
