"""Samples for translation: the encoder reads the source, the decoder writes the target.

Shapes: ``s`` is ``seq_length`` of the encoder, ``d`` is ``decoder_seq_length``.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mds_data.datasets.encoder_decoder import encoder_decoder_sample
from mds_data.datasets.sentence_dataset import store_vocabulary
from mds_data.datasets.sentences import sentence_table
from mds_data.sampling.permutation import EpochOrder
from mds_data.store.selection import document_range
from mds_data.store.token_store import TokenStore
from mds_data.tokenizers.vocabulary import Vocabulary

__all__ = ["NMTDataset"]


class NMTDataset:
    """Pairs of a store that ``mds-data preprocess-nmt`` wrote, shuffled anew in each epoch.

    Args:
        store: An open store of pairs.
        seq_length: Tokens that the encoder reads.
        decoder_seq_length: Tokens that the decoder writes, its beginning or end mark included.
        num_samples: How many samples there are, over as many epochs as that takes; None is one
            epoch.
        seed: Chooses the order.
        split: As in `GPTDataset`, by pairs.
        shuffle: False keeps the pairs in the store's order.
        vocabulary: Of the tokenizer that made the store; the store's own if None.

    Raises:
        ValueError: The store holds no pairs, or an argument can't be.
        TokenizerError: The vocabulary lacks a mark.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        seq_length: int,
        decoder_seq_length: int,
        num_samples: int | None = None,
        seed: int = 1234,
        split: tuple[str, str] | str | None = None,
        shuffle: bool = True,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        if seq_length < 1 or decoder_seq_length < 2:
            raise ValueError(
                f"seq_length ({seq_length}) must be at least 1 and decoder_seq_length "
                f"({decoder_seq_length}) at least 2"
            )
        if num_samples is not None and num_samples < 0:
            raise ValueError(f"num_samples ({num_samples}) must not be negative")
        self.store = store
        self.seq_length = seq_length
        self.decoder_seq_length = decoder_seq_length
        self._table = sentence_table(store)
        self._first = self._pairs(split)
        vocabulary = store_vocabulary(store, vocabulary)
        self._bos, self._eos, self._pad = (vocabulary.id_of(m) for m in ("bos", "eos", "pad"))
        self._order = EpochOrder(len(self._first), seed=seed, shuffle=shuffle)
        self._length = len(self._first) if num_samples is None else num_samples

    def _pairs(self, split: tuple[str, str] | str | None) -> NDArray[np.int64]:
        """The number of each pair's source in the table; erased pairs have none."""
        first, stop = document_range(self.store, split)
        counts = np.diff(self._table.first[first : stop + 1])
        if not self.store.has_sentences or not np.isin(counts, (0, 2)).all():
            raise ValueError(
                f"{self.store.path}: holds no pairs of source and target; "
                f"write some by mds-data preprocess-nmt"
            )
        pairs: NDArray[np.int64] = self._table.first[first:stop][counts == 2]
        if not len(pairs):
            raise ValueError(f"{self.store.path}: holds no pair in split {split!r}")
        return pairs

    def __len__(self) -> int:
        return self._length

    @property
    def pairs(self) -> int:
        """Pairs of the split, which one epoch shows once."""
        return len(self._first)

    def pair(self, number: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """The ids of source and target of sample ``number``, as stored, uncut."""
        place = number + self._length if number < 0 else number
        if not 0 <= place < self._length:
            raise IndexError(f"sample {number} of {self._length}")
        return self._located(place)

    def _located(self, place: int) -> tuple[NDArray[Any], NDArray[Any]]:
        first = int(self._first[self._order.locate(place)[1]])
        start = int(self._table.start[first])
        middle = start + int(self._table.length[first])
        stop = middle + int(self._table.length[first + 1])
        return self.store.tokens(start, middle), self.store.tokens(middle, stop)

    def __getitem__(self, number: int) -> dict[str, NDArray[Any]]:
        """One sample; a side that is too long is cut at its end.

        Returns:
            ``encoder_tokens`` [s], ``decoder_tokens`` [d], ``labels`` [d] (-1 in the padding),
            ``loss_mask`` [d], ``encoder_padding_mask`` [s] and ``decoder_padding_mask`` [d] (1
            where a token is), all int64; ``truncated``, a single number.
        """
        return self._sample(*self.pair(number))

    def beyond(self, number: int) -> dict[str, NDArray[Any]]:
        """Sample ``number`` of the order without end, past ``len`` too: further epochs."""
        return self._sample(*self._located(number))

    def _sample(self, source: NDArray[Any], target: NDArray[Any]) -> dict[str, NDArray[Any]]:
        most = self.seq_length, self.decoder_seq_length - 1
        sample = encoder_decoder_sample(
            source[: most[0]].tolist(),
            target[: most[1]].tolist(),
            lengths=(self.seq_length, self.decoder_seq_length),
            bos_id=self._bos,
            eos_id=self._eos,
            pad_id=self._pad,
        )
        cut = len(source) > most[0] or len(target) > most[1]
        return sample | {"truncated": np.array(int(cut))}
