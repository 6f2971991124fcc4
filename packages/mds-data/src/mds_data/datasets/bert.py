"""Samples for BERT: two segments of one document, marked, masked and padded.

Shapes: ``s`` is ``seq_length``.
"""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mds_data.datasets.masking import (
    MaskedTokens,
    MaskingStyle,
    bert_replacement,
    mask_tokens,
    word_groups,
)
from mds_data.datasets.sentence_dataset import Order, SentenceDataset, store_vocabulary
from mds_data.datasets.sentences import SentenceSpan
from mds_data.sampling.permutation import mix
from mds_data.store.token_store import TokenStore
from mds_data.tokenizers.vocabulary import Vocabulary

__all__ = ["BertDataset"]

Segments = Literal["order", "next", "one"]
_TRIES = 10


class BertDataset(SentenceDataset):
    """Masked samples of sentences from a store that keeps them (``--split-sentences``).

    For ``order="megatron"`` and ``segments="order"`` (or ``"one"``) the samples are those of
    Megatron-DeepSpeed for the same seed, length, split and number of samples, bit for bit.

    Args:
        store: An open store.
        seq_length: Tokens of a sample, its marks included.
        num_samples: How many samples there are; one pass over the documents if None. In Megatron's
            order whole passes are laid out, so ``len`` may be larger.
        seed: Chooses order, segments and masks.
        split: As in `GPTDataset`, by documents.
        order: ``"fast"`` or ``"megatron"``.
        segments: ``"order"`` swaps the two segments of every other sample (sentence order, what
            Megatron does); ``"next"`` takes the second segment of every other sample from another
            document (BERT's next sentence); ``"one"`` makes one segment.
        masking: How many tokens are masked, and in what pieces.
        short_probability: Share of samples of a random, shorter length.
        vocabulary: Of the tokenizer that made the store; the store's own if None.

    Raises:
        ValueError: No document has enough sentences, or an argument can't be.
        TokenizerError: The vocabulary lacks a mark.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        seq_length: int,
        num_samples: int | None = None,
        seed: int = 1234,
        split: tuple[str, str] | str | None = None,
        order: Order = "fast",
        segments: Segments = "order",
        masking: MaskingStyle | None = None,
        short_probability: float = 0.1,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        if segments not in ("order", "next", "one"):
            raise ValueError(f"segments must be 'order', 'next' or 'one', not {segments!r}")
        super().__init__(
            store,
            seq_length=seq_length,
            marks=3,
            fewest=1 if segments == "one" else 2,
            num_samples=num_samples,
            seed=seed,
            split=split,
            short_probability=short_probability,
            order=order,
        )
        self.segments = segments
        self.masking = masking or MaskingStyle()
        self.vocabulary = vocabulary = store_vocabulary(store, vocabulary)
        self._cls, self._sep, self._pad = (vocabulary.id_of(m) for m in ("cls", "sep", "pad"))
        self._mask_id = vocabulary.id_of("mask")
        self._continues = vocabulary.continues_word if self.masking.whole_words else None

    def __getitem__(self, number: int) -> dict[str, NDArray[Any]]:
        """One sample.

        Returns:
            ``tokens``, ``token_types``, ``labels`` (-1 where nothing is predicted), ``loss_mask``
            and ``padding_mask`` (1 where a token is), each [s] int64; ``is_random`` (the segments
            were swapped, or are no neighbours) and ``truncated``, single numbers.
        """
        return self._sample(*self._located(number))

    def _sample(self, place: int, span: SentenceSpan) -> dict[str, NDArray[Any]]:
        random = self._random(place)
        first, second, is_random = self._segments(place, span, random)
        truncated = _truncate(first, second, most=span.target, random=random)
        tokens = [self._cls, *first, self._sep]
        types = [0] * len(tokens)
        if second:
            tokens += [*second, self._sep]
            types += [1] * (len(second) + 1)
        masked = self._masked(tokens, span.target, random)
        return self._padded(masked, types) | {
            "is_random": np.array(int(is_random)),
            "truncated": np.array(int(truncated)),
        }

    def _segments(
        self, place: int, span: SentenceSpan, random: np.random.RandomState
    ) -> tuple[list[int], list[int], bool]:
        sentences = self._sentences(span)
        if self.segments == "one":
            return _joined(sentences), [], False
        cut = 1 if len(sentences) < 3 else int(random.randint(1, len(sentences)))
        first, second = _joined(sentences[:cut]), _joined(sentences[cut:])
        is_random = bool(random.random_sample() < 0.5)
        if not is_random:
            return first, second, False
        if self.segments == "order":
            return second, first, True
        return first, self._elsewhere(place, span, random), True

    def _elsewhere(
        self, place: int, span: SentenceSpan, random: np.random.RandomState
    ) -> list[int]:
        """A second segment from another document, if a few tries find one."""
        document = self._document(span)
        other = span
        for attempt in range(_TRIES):
            other = self.order.span(mix(self.seed, place, attempt, 3) % len(self))
            if self._document(other) != document:
                break
        sentences = self._sentences(other)
        return _joined(sentences[int(random.randint(0, len(sentences))) :])

    def _document(self, span: SentenceSpan) -> int:
        return int(np.searchsorted(self._table.first, span.first, side="right"))

    def _masked(
        self, tokens: list[int], target: int, random: np.random.RandomState
    ) -> MaskedTokens:
        groups = word_groups(
            tokens,
            marks=frozenset((self._cls, self._sep)),
            continues_word=self._continues,
        )
        return mask_tokens(
            tokens,
            groups,
            style=self.masking,
            most=self.masking.probability * target,
            replace=bert_replacement(mask_id=self._mask_id, used_ids=self.vocabulary.used_ids),
            random=random,
        )

    def _padded(self, masked: MaskedTokens, types: list[int]) -> dict[str, NDArray[Any]]:
        size, count = self.seq_length, len(types)
        tokens = np.full(size, self._pad, np.int64)
        tokens[:count] = masked.tokens
        token_types = np.full(size, self._pad, np.int64)
        token_types[:count] = types
        labels = np.full(size, -1, np.int64)
        labels[masked.positions] = masked.labels
        loss_mask = np.zeros(size, np.int64)
        loss_mask[masked.positions] = 1
        return {
            "tokens": tokens,
            "token_types": token_types,
            "labels": labels,
            "loss_mask": loss_mask,
            "padding_mask": (np.arange(size) < count).astype(np.int64),
        }


def _joined(sentences: list[list[int]]) -> list[int]:
    return [token for sentence in sentences for token in sentence]


def _truncate(
    first: list[int], second: list[int], *, most: int, random: np.random.RandomState
) -> bool:
    """Cut single tokens, from either end of the longer segment, until both fit."""
    if len(first) + len(second) <= most:
        return False
    for _ in range(len(first) + len(second) - most):
        segment = first if len(first) > len(second) else second
        if random.random_sample() < 0.5:
            del segment[0]
        else:
            segment.pop()
    return True
