"""Encode one huge document in pieces, with the ids of the whole, so that memory stays small.

A tokenizer's record of a token is some 100 bytes; a document of 100 MB taken at once would need
gigabytes. One exception to "the ids of the whole": a unigram model adds up scores in single
precision, so over a long text rounding decides near ties; two ids in a million came out otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mds_data.tokenizers.protocol import Tokenizer

__all__ = ["LONG", "encode_long"]

LONG = 2**19
"""Characters from which a document is worth cutting."""
_PIECE = 2**18
_WINDOW = 256
_TRIES = 16
# A space between two letters: normalizers join no marks across it, pre-tokenizers all cut there.
_BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_])[ \n](?=[^\W\d_])")


def encode_long(
    text: str, *, tokenizer: Tokenizer, dtype: np.dtype[Any], piece: int = _PIECE
) -> NDArray[Any]:
    """Return the ids of a text, [n], the same as if it were encoded at once.

    Args:
        text: The document.
        tokenizer: Encodes it. If its tokens may cross words, the text is not cut.
        dtype: Of the result.
        piece: Characters in a piece, about.
    """
    parts = _pieces(text, tokenizer=tokenizer, piece=piece) if tokenizer.splits_at_words else [text]
    return np.concatenate([np.asarray(tokenizer.encode_batch([part])[0], dtype) for part in parts])


def _pieces(text: str, *, tokenizer: Tokenizer, piece: int) -> Iterator[str]:
    start = search = 0
    while len(text) - search > 2 * piece:
        cut = _find_cut(text, first=search + piece, last=search + 2 * piece, tokenizer=tokenizer)
        if cut is None:
            search += piece
            continue
        stop, resume = cut
        yield text[start:stop]
        start = search = resume
    yield text[start:]


def _find_cut(text: str, *, first: int, last: int, tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Return where a piece ends and the next begins; None if no place near is proven harmless."""
    for _, match in zip(range(_TRIES), _BETWEEN_WORDS.finditer(text, first, last), strict=False):
        at = match.start()
        before, after = text[max(0, at - _WINDOW) : at], text[at : at + _WINDOW]
        # A model that puts a space before each text (SentencePiece) must not see the space itself.
        whole, left, with_space, without = tokenizer.encode_batch(
            [before + after, before, after, after[1:]]
        )
        if left + with_space == whole:
            return at, at
        if left + without == whole:
            return at, at + 1
    return None
