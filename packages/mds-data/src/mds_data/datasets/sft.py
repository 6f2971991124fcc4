"""Samples for fine-tuning on answers: prompts are read, answers are learned, samples are packed.

Shapes: ``s`` is ``seq_length``.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mds_data.datasets.sentences import sentence_table
from mds_data.sampling.packing import pack
from mds_data.sampling.permutation import EpochOrder
from mds_data.store.selection import document_range
from mds_data.store.token_store import TokenStore

__all__ = ["SFTDataset"]


class SFTDataset:
    """Conversations of a store whose documents alternate parts read and parts learned.

    ``mds-data preprocess-sft`` writes such stores; one of ``preprocess-nmt`` is read alike (the
    target is learned).

    Args:
        store: An open store.
        seq_length: Tokens of a sample. A longer conversation is cut at its end, and left out if
            nothing to learn remains.
        num_samples: How many samples there are, over as many epochs as that takes; None is one
            epoch.
        seed: Chooses the order, and what is packed together.
        split: As in `GPTDataset`, by conversations.
        packing: Put several conversations into a sample. They are told apart by
            ``cumulative_lengths`` and ``position_ids``.
        learn_all: Learn prompts too.
        pad_id: Fills a sample up; nothing is learned from it.

    Raises:
        ValueError: The store has no such parts, or an argument can't be.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        seq_length: int,
        num_samples: int | None = None,
        seed: int = 1234,
        split: tuple[str, str] | str | None = None,
        packing: bool = True,
        learn_all: bool = False,
        pad_id: int = 0,
    ) -> None:
        if seq_length < 1 or (num_samples is not None and num_samples < 0):
            raise ValueError(
                f"seq_length ({seq_length}) must be positive and num_samples ({num_samples}) "
                f"not negative"
            )
        if not 0 <= pad_id < store.vocab_size:
            raise ValueError(f"pad_id ({pad_id}) is outside the vocabulary of {store.vocab_size}")
        if not store.has_sentences:
            raise ValueError(
                f"{store.path}: keeps no parts, so prompts can't be told from answers; "
                f"write it by mds-data preprocess-sft"
            )
        self.store = store
        self.seq_length = seq_length
        self._learn_all = learn_all
        self._pad = pad_id
        self._table = sentence_table(store)
        self._documents = self._usable(*document_range(store, split))
        self.bins = self._binned(packing=packing, seed=seed)
        """Places in `conversations` of what each sample of an epoch holds."""
        self._order = EpochOrder(len(self.bins), seed=seed)
        self._length = len(self.bins) if num_samples is None else num_samples

    def _usable(self, first: int, stop: int) -> NDArray[np.int64]:
        """The conversations of which something can be learned within ``seq_length``."""
        table = self._table
        counts = np.diff(table.first[first : stop + 1])
        if (counts % 2).any():
            odd = first + int(np.flatnonzero(counts % 2)[0])
            raise ValueError(
                f"{self.store.path}: document {odd} has {int(counts[odd - first])} parts, and "
                f"parts read and learned must alternate; write it by mds-data preprocess-sft"
            )
        numbers = np.arange(first, stop)[counts > 0]
        starts = self.store.doc_start[numbers]
        learned = table.start[table.first[:-1][numbers] + 1] - starts  # where the first answer is
        length = self.store.doc_length[numbers]
        fits = (length > 1) & (learned < np.minimum(length, self.seq_length + 1))
        self.left_out = int(len(numbers) - fits.sum())
        """Conversations whose first answer lies beyond ``seq_length``."""
        self.cut = int((length[fits] > self.seq_length + 1).sum())
        """Conversations that lose their end."""
        if not fits.any():
            raise ValueError(
                f"{self.store.path}: no answer begins within seq_length ({self.seq_length}); "
                f"make it larger"
            )
        usable: NDArray[np.int64] = numbers[fits]
        return usable

    def _binned(self, *, packing: bool, seed: int) -> list[list[int]]:
        if not packing:
            return [[number] for number in range(len(self._documents))]
        lengths = np.minimum(self.store.doc_length[self._documents] - 1, self.seq_length)
        return pack(lengths, capacity=self.seq_length, seed=seed)

    def __len__(self) -> int:
        return self._length

    @property
    def conversations(self) -> NDArray[np.int64]:
        """Numbers of the documents that are used."""
        return self._documents

    @property
    def tokens_per_sample(self) -> float:
        """Tokens of a sample on average, padding not counted."""
        lengths = np.minimum(self.store.doc_length[self._documents] - 1, self.seq_length)
        return float(lengths.sum()) / len(self.bins)

    def __getitem__(self, number: int) -> dict[str, NDArray[Any]]:
        """One sample.

        Returns:
            ``tokens`` and ``labels`` [s] int64, ``loss_mask`` [s] float32 (1 where the label is
            part of an answer), ``position_ids`` [s] int64 from 0 in each conversation,
            ``cumulative_lengths`` [conversations + 1 or 2] int32: the borders of conversations, and
            of the padding.
        """
        place = number + self._length if number < 0 else number
        if not 0 <= place < self._length:
            raise IndexError(f"sample {number} of {self._length}")
        return self.beyond(place)

    def beyond(self, number: int) -> dict[str, NDArray[Any]]:
        """Sample ``number`` of the order without end, past ``len`` too: further epochs."""
        size = self.seq_length
        sample: dict[str, NDArray[Any]] = {
            "tokens": np.full(size, self._pad, np.int64),
            "labels": np.full(size, self._pad, np.int64),
            "loss_mask": np.zeros(size, np.float32),
            "position_ids": np.zeros(size, np.int64),
        }
        borders = [0]
        for member in self.bins[self._order.locate(number)[1]]:
            borders.append(self._put(sample, int(self._documents[member]), at=borders[-1]))
        if borders[-1] < size:
            sample["position_ids"][borders[-1] :] = np.arange(size - borders[-1])
            borders.append(size)
        return sample | {"cumulative_lengths": np.array(borders, np.int32)}

    def _put(self, sample: dict[str, NDArray[Any]], document: int, *, at: int) -> int:
        """Write one conversation into a sample; where it ends."""
        ids = self.store[document][: self.seq_length + 1]
        stop = at + len(ids) - 1
        sample["tokens"][at:stop] = ids[:-1]
        sample["labels"][at:stop] = ids[1:]
        sample["loss_mask"][at:stop] = self._learned(document)[1 : len(ids)]
        sample["position_ids"][at:stop] = np.arange(stop - at)
        return stop

    def _learned(self, document: int) -> NDArray[np.bool_]:
        """[tokens] whether each token of a conversation is part of an answer."""
        first, stop = self._table.first[document : document + 2].tolist()
        lengths = self._table.length[first:stop]
        learned = np.arange(stop - first) % 2 == 1
        return np.repeat(learned | self._learn_all, lengths)
