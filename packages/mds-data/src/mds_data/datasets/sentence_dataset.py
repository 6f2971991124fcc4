"""What datasets of whole sentences share: the store's sentences, an order, and the vocabulary."""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mds_data.datasets.sentences import (
    FastSentenceOrder,
    MegatronSentenceOrder,
    SentenceOrder,
    SentenceSpan,
    sentence_table,
)
from mds_data.errors import StoreError
from mds_data.store.selection import document_range
from mds_data.store.token_store import TokenStore
from mds_data.tokenizers.vocabulary import Vocabulary

__all__ = ["Order", "SentenceDataset", "store_vocabulary"]

Order = Literal["fast", "megatron"]


def store_vocabulary(store: TokenStore, given: Vocabulary | None) -> Vocabulary:
    """The vocabulary that was given, or that of the tokenizer in the store."""
    if given is not None:
        # a Megatron pair knows only the range of its integers
        if store.path.is_dir() and len(given) < store.vocab_size:
            raise ValueError(
                f"{store.path}: has a vocabulary of {store.vocab_size}, and {given.name} has "
                f"{len(given)} tokens; give the tokenizer that made the store"
            )
        return given
    record = store.manifest.tokenizer
    if record is None:
        raise ValueError(
            f"{store.path}: keeps no tokenizer, and this dataset must know its marks and words; "
            f"give vocabulary=Vocabulary.of_tokenizer(...)"
        )
    if store.is_encrypted:
        raise StoreError(
            f"{store.path}: is encrypted, and no plain copy of its tokenizer is written; give the "
            f"tokenizer: vocabulary=Vocabulary.of_tokenizer(...), or data.tokenizer in a run"
        )
    return Vocabulary.of_record(store.path, record, vocab_size=store.vocab_size)


class SentenceDataset:
    """Samples that are whole sentences of one document.

    Args:
        store: An open store, preprocessed with ``--split-sentences``.
        seq_length: Tokens of a sample.
        marks: Tokens of it that are no text.
        fewest: Sentences that a sample needs.
        num_samples: How many samples there are; one pass over the documents if None.
        seed: Chooses the order.
        split: As in `GPTDataset`, by documents.
        short_probability: Share of samples of a random, shorter length.
        order: ``"fast"`` or ``"megatron"``.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        seq_length: int,
        marks: int,
        fewest: int,
        num_samples: int | None,
        seed: int,
        split: tuple[str, str] | str | None,
        short_probability: float,
        order: Order,
    ) -> None:
        if seq_length < marks + 2:
            raise ValueError(
                f"seq_length ({seq_length}) leaves no room for text beside {marks} marks; make it "
                f"longer"
            )
        if not 0 <= short_probability <= 1:
            raise ValueError(f"short_probability ({short_probability}) must lie from 0 to 1")
        if num_samples is not None and num_samples < 0:
            raise ValueError(f"num_samples ({num_samples}) must not be negative")
        kinds = {"fast": FastSentenceOrder, "megatron": MegatronSentenceOrder}
        if order not in kinds:
            raise ValueError(f"order must be 'fast' or 'megatron', not {order!r}")
        first, stop = document_range(store, split)
        self.store = store
        self.seq_length = seq_length
        self.seed = seed
        self._table = sentence_table(store)
        self.order: SentenceOrder = kinds[order](
            self._table,
            first=first,
            stop=stop,
            num_samples=num_samples,
            target=seq_length - marks,
            short_probability=short_probability,
            fewest=fewest,
            seed=seed,
        )
        self._check(stop - first, fewest=fewest, split=split)

    def _check(self, documents: int, *, fewest: int, split: object) -> None:
        if len(self.order):
            return
        part = "" if split is None else f" in split {split!r}"
        raise ValueError(
            f"{self.store.path}: none of the {documents} documents{part} has {fewest} sentences of "
            f"at most 512 tokens; preprocess with --split-sentences, or use one segment"
        )

    @property
    def documents_left_out(self) -> int:
        """Documents that make no sample: too few sentences, or one of more than 512 tokens."""
        return self.order.documents_left_out

    def __len__(self) -> int:
        return len(self.order)

    @property
    def tokens_per_sample(self) -> int:
        """Tokens of a sample, padding counted."""
        return self.seq_length

    def beyond(self, number: int) -> dict[str, NDArray[Any]]:
        """Sample ``number`` of the order without end, past ``len`` too.

        The fast order goes on with further epochs, Megatron's begins again.
        """
        is_fast = isinstance(self.order, FastSentenceOrder)
        place = number if is_fast else number % len(self)
        return self._sample(place, self.order.span(place))

    def _sample(self, place: int, span: SentenceSpan) -> dict[str, NDArray[Any]]:
        raise NotImplementedError

    def _located(self, number: int) -> tuple[int, SentenceSpan]:
        place = number + len(self) if number < 0 else number
        if not 0 <= place < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return place, self.order.span(place)

    def _sentence(self, number: int) -> NDArray[Any]:
        start = int(self._table.start[number])
        return self.store.tokens(start, start + int(self._table.length[number]))

    def _sentences(self, span: SentenceSpan) -> list[list[int]]:
        return [self._sentence(number).tolist() for number in range(span.first, span.stop)]

    def _random(self, place: int) -> np.random.RandomState:
        return np.random.RandomState((self.seed + place) % 2**32)
