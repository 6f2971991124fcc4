"""Text that is token ids already, as Megatron's NullTokenizer reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from mds_data.tokenizers.protocol import ModelFile, TokenIds

__all__ = ["NullTokenizer"]


class NullTokenizer:
    """Numbers below ``vocab_size`` with white space between; ``vocab_size`` ends a document."""

    def __init__(self, vocab_size: int) -> None:
        self._base_size = vocab_size
        self.kind = "null"
        self.name = "NullTokenizer"
        self.vocab_size = vocab_size + 1
        self.eod_id = vocab_size
        self.file = ModelFile("tokenizer.json", _description(vocab_size))
        self.fingerprint = self.file.sha256
        self.splits_at_words = False

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the numbers in each text; ValueError for a word that is none, or is too large."""
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> list[int]:
        words = text.split()
        wrong = next((word for word in words if not word.lstrip("+-").isdecimal()), None)
        if wrong is not None:
            raise ValueError(f"{wrong[:40]!r} is no token id, which all words are here")
        ids = [int(word) for word in words]
        outside = next((i for i in ids if not 0 <= i < self._base_size), None)
        if outside is not None:
            raise ValueError(f"token id {outside} is not between 0 and {self._base_size - 1}")
        return ids

    def encode_ids(self, texts: Sequence[str]) -> Sequence[TokenIds]:
        """Return the same in the form that costs least."""
        return self.encode_batch(texts)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the numbers as text."""
        return " ".join(str(int(i)) for i in ids)

    def pieces(self) -> list[str]:
        """Return the spelling of every id: its number."""
        return [str(number) for number in range(self.vocab_size)]

    def special_ids(self) -> dict[str, int]:
        """Return nothing: the end-of-document id has no spelling."""
        return {}


def _description(vocab_size: int) -> bytes:
    return json.dumps({"kind": "null", "vocab_size": vocab_size}).encode()
