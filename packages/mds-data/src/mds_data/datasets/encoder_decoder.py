"""The arrays that an encoder and a decoder read, padded. Shared by T5 and translation."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["encoder_decoder_sample"]


def encoder_decoder_sample(
    encoder: Sequence[int],
    decoder: Sequence[int],
    *,
    lengths: tuple[int, int],
    bos_id: int,
    eos_id: int,
    pad_id: int,
) -> dict[str, NDArray[Any]]:
    """Pad both sides; the decoder reads ``bos`` and its text, and predicts its text and ``eos``.

    Returns:
        ``encoder_tokens`` and ``encoder_padding_mask`` [s]; ``decoder_tokens``, ``labels``,
        ``loss_mask`` and ``decoder_padding_mask`` [d]; all int64.

    Raises:
        ValueError: A side is longer than its length.
    """
    most, most_decoder = lengths
    if len(encoder) > most or len(decoder) + 1 > most_decoder:
        raise ValueError(
            f"a sample of {len(encoder)} and {len(decoder)} + 1 tokens does not fit seq_length "
            f"{most} and decoder_seq_length {most_decoder}; make the lengths larger"
        )
    encoder_tokens = np.full(most, pad_id, np.int64)
    encoder_tokens[: len(encoder)] = encoder
    decoder_tokens = np.full(most_decoder, pad_id, np.int64)
    decoder_tokens[: len(decoder) + 1] = [bos_id, *decoder]
    labels = np.full(most_decoder, -1, np.int64)
    labels[: len(decoder) + 1] = [*decoder, eos_id]
    decoder_mask = (np.arange(most_decoder) <= len(decoder)).astype(np.int64)
    return {
        "encoder_tokens": encoder_tokens,
        "decoder_tokens": decoder_tokens,
        "labels": labels,
        "loss_mask": decoder_mask.copy(),
        "encoder_padding_mask": (np.arange(most) < len(encoder)).astype(np.int64),
        "decoder_padding_mask": decoder_mask,
    }
