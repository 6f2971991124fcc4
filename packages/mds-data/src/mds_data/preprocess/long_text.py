"""Encode one huge document in pieces, with the ids of the whole, so that memory stays small.

A tokenizer's record of a token is some 100 bytes; a document of 100 MB taken at once would need
gigabytes. One exception to "the ids of the whole": a unigram model adds up scores in single
precision, so over a long text rounding decides near ties; two ids in a million came out otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mds_data.tokenizers.protocol import Tokenizer

__all__ = ["LONG", "encode_long", "encoded_pieces"]

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
    parts = encoded_pieces([text], tokenizer=tokenizer, piece=piece)
    return np.concatenate([np.asarray(part, dtype) for part in parts])


def encoded_pieces(
    texts: Iterable[str], *, tokenizer: Tokenizer, piece: int = _PIECE
) -> Iterator[list[int]]:
    """Yield the ids of a document that comes in parts, some of them at a time.

    Args:
        texts: The document, cut anywhere.
        tokenizer: Encodes it. If its tokens may cross words, the document is not cut.
        piece: Characters that are encoded at once, about.
    """
    if not tokenizer.splits_at_words:
        yield tokenizer.encode_batch(["".join(texts)])[0]
        return
    for part in _pieces(texts, tokenizer=tokenizer, piece=piece):
        yield tokenizer.encode_batch([part])[0]


def _pieces(texts: Iterable[str], *, tokenizer: Tokenizer, piece: int) -> Iterator[str]:
    """Yield parts of the document that can be encoded each by itself."""
    waiting = ""
    search = 0
    coming = iter(texts)
    while True:
        # A place is proven by the words around it, so more must be there than up to the place.
        while len(waiting) - search <= 2 * piece + _WINDOW:
            more = next(coming, None)
            if more is None:
                break
            waiting += more
        if len(waiting) - search <= 2 * piece:
            yield waiting
            return
        found = _find_cut(
            waiting, first=search + piece, last=search + 2 * piece, tokenizer=tokenizer
        )
        if found is None:
            search += piece
            continue
        stop, resume = found
        yield waiting[:stop]
        waiting, search = waiting[resume:], 0


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
