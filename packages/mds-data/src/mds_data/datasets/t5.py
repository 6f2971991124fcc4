"""Samples for T5: spans of the text become sentinels, and the decoder writes the spans.

Shapes: ``s`` is ``seq_length`` of the encoder, ``d`` is ``decoder_seq_length``.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mds_data.datasets.encoder_decoder import encoder_decoder_sample
from mds_data.datasets.masking import MaskedTokens, MaskingStyle, mask_tokens, word_groups
from mds_data.datasets.sentence_dataset import Order, SentenceDataset, store_vocabulary
from mds_data.datasets.sentences import SentenceSpan
from mds_data.store.token_store import TokenStore
from mds_data.tokenizers.vocabulary import Vocabulary

__all__ = ["T5Dataset"]


class T5Dataset(SentenceDataset):
    """Samples of sentences from a store that keeps them (``--split-sentences``), spans cut out.

    For ``order="megatron"`` the samples are those of Megatron-DeepSpeed for the same seed, lengths,
    split and number of samples, bit for bit.

    Args:
        store: An open store whose tokenizer has sentinels (``--vocab-extra-ids 100``).
        seq_length: Tokens that the encoder reads.
        decoder_seq_length: Tokens that the decoder writes.
        num_samples: How many samples there are; one pass over the documents if None. In Megatron's
            order whole passes are laid out, so ``len`` may be larger.
        seed: Chooses order and spans.
        split: As in `GPTDataset`, by documents.
        order: ``"fast"`` or ``"megatron"``.
        masking: How much is cut out, and in what pieces.
        short_probability: Share of samples of a random, shorter length.
        vocabulary: Of the tokenizer that made the store; the store's own if None.

    Raises:
        ValueError: The vocabulary has too few sentinels, or an argument can't be.
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
        order: Order = "fast",
        masking: MaskingStyle | None = None,
        short_probability: float = 0.1,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        super().__init__(
            store,
            seq_length=seq_length,
            marks=2,
            fewest=1,
            num_samples=num_samples,
            seed=seed,
            split=split,
            short_probability=short_probability,
            order=order,
        )
        self.decoder_seq_length = decoder_seq_length
        self.masking = masking or MaskingStyle(longest=10, geometric=True)
        self.vocabulary = vocabulary = store_vocabulary(store, vocabulary)
        self._bos, self._eos, self._pad = (vocabulary.id_of(m) for m in ("bos", "eos", "pad"))
        self._marks = frozenset(
            vocabulary.id_of(mark) for mark in ("cls", "sep") if vocabulary.has(mark)
        )
        self._continues = vocabulary.continues_word if self.masking.whole_words else None
        if not vocabulary.sentinels:
            raise ValueError(
                f"{vocabulary.name} has no sentinels <extra_id_0> ..., which stand for the spans; "
                f"preprocess with --vocab-extra-ids 100"
            )

    def __getitem__(self, number: int) -> dict[str, NDArray[Any]]:
        """One sample.

        Returns:
            ``encoder_tokens`` [s], ``decoder_tokens`` [d], ``labels`` [d] (-1 in the padding),
            ``loss_mask`` [d], ``encoder_padding_mask`` [s] and ``decoder_padding_mask`` [d] (1
            where a token is), all int64; ``truncated``, a single number.
        """
        return self._sample(*self._located(number))

    def _sample(self, place: int, span: SentenceSpan) -> dict[str, NDArray[Any]]:
        text = [token for sentence in self._sentences(span) for token in sentence]
        tokens = text[: span.target]
        groups = word_groups(tokens, marks=self._marks, continues_word=self._continues)
        masked = mask_tokens(
            tokens,
            groups,
            style=self.masking,
            most=self.masking.probability * span.target,
            replace=lambda token, _: token,
            random=self._random(place),
        )
        encoder, decoder = self._with_sentinels(tokens, masked)
        sample = encoder_decoder_sample(
            encoder,
            decoder,
            lengths=(self.seq_length, self.decoder_seq_length),
            bos_id=self._bos,
            eos_id=self._eos,
            pad_id=self._pad,
        )
        return sample | {"truncated": np.array(int(len(text) > len(tokens)))}

    def _with_sentinels(
        self, tokens: list[int], masked: MaskedTokens
    ) -> tuple[list[int], list[int]]:
        sentinels = self.vocabulary.sentinels
        if len(masked.spans) > len(sentinels):
            raise ValueError(
                f"{len(masked.spans)} spans need as many sentinels, and {self.vocabulary.name} has "
                f"{len(sentinels)}; preprocess with a larger --vocab-extra-ids"
            )
        encoder: list[int] = []
        decoder: list[int] = []
        start = 0
        for sentinel, positions in zip(sentinels, masked.spans, strict=False):
            encoder += [*tokens[start : positions[0]], sentinel]
            decoder += [sentinel, *(tokens[place] for place in positions)]
            start = positions[-1] + 1
        return encoder + tokens[start:], decoder
