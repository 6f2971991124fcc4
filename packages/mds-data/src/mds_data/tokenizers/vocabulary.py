"""What a dataset must know of a vocabulary: which ids are marks, and which go on with a word."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mds_data.store.records import TokenizerRecord
from mds_data.tokenizers.load import load_tokenizer, spec_of_store_file
from mds_data.tokenizers.protocol import Tokenizer, TokenizerError

__all__ = ["Vocabulary"]

_NAMES: dict[str, tuple[str, ...]] = {
    "cls": ("[CLS]", "<CLS>", "<cls>", "<s>"),
    "sep": ("[SEP]", "<SEP>", "<sep>", "</s>"),
    "mask": ("[MASK]", "<MASK>", "<mask>"),
    "pad": ("[PAD]", "<PAD>", "<pad>", "<|padding|>", "<|pad|>"),
    "bos": ("[BOS]", "<BOS>", "<s>", "<bos>", "<|begin_of_text|>", "<pad>"),
    "eos": ("[EOS]", "<EOS>", "</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>"),
}
_SENTINEL = "<extra_id_{}>"
_MARKS_OF_WORD_BEGINS = ("\N{LOWER ONE EIGHTH BLOCK}", "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}")


class Vocabulary:
    """The spellings of all ids.

    Args:
        pieces: [vocab_size] the spelling of each id; "" where an id has none.
        name: How messages call the tokenizer.
    """

    def __init__(self, pieces: Sequence[str], *, name: str = "the tokenizer") -> None:
        self.pieces = tuple(pieces)
        self.name = name
        self._ids = {piece: number for number, piece in enumerate(pieces) if piece}

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer) -> Vocabulary:
        """The vocabulary of a loaded tokenizer."""
        return cls(tokenizer.pieces(), name=tokenizer.name)

    @classmethod
    def of_record(cls, root: Path, record: TokenizerRecord, *, vocab_size: int) -> Vocabulary:
        """The vocabulary of the tokenizer that a store keeps.

        Ids beyond the file's are T5's sentinels, which a SentencePiece file does not know.
        """
        spec = spec_of_store_file(root / record.file, kind=record.kind)
        tokenizer = load_tokenizer(spec)
        pieces = tokenizer.pieces()
        pieces += [_SENTINEL.format(number) for number in range(vocab_size - len(pieces))]
        return cls(pieces, name=record.name or record.file)

    def __len__(self) -> int:
        return len(self.pieces)

    def id_of(self, mark: str) -> int:
        """The id of a mark: ``cls``, ``sep``, ``mask``, ``pad``, ``bos`` or ``eos``.

        Raises:
            TokenizerError: The vocabulary has no such token.
        """
        found = next((self._ids[name] for name in _NAMES[mark] if name in self._ids), None)
        if found is None:
            raise TokenizerError(
                f"{self.name} has no {mark} token (such as {', '.join(_NAMES[mark][:3])}), which "
                f"this dataset needs; give its id by {mark}_id, or use another tokenizer"
            )
        return found

    def has(self, mark: str) -> bool:
        """Whether `id_of` would find the mark."""
        return any(name in self._ids for name in _NAMES[mark])

    def id_of_piece(self, piece: str) -> int | None:
        """The id with this very spelling, if there is one."""
        return self._ids.get(piece)

    @cached_property
    def sentinels(self) -> tuple[int, ...]:
        """The ids of ``<extra_id_0>``, ``<extra_id_1>`` ..., in this order."""
        found: list[int] = []
        while (number := self._ids.get(_SENTINEL.format(len(found)))) is not None:
            found.append(number)
        return tuple(found)

    @cached_property
    def used_ids(self) -> NDArray[np.int64]:
        """The ids that have a spelling, ascending."""
        return np.array(sorted(self._ids.values()), np.int64)

    @cached_property
    def continues_word(self) -> NDArray[np.bool_]:
        """[vocab_size] whether a token goes on with the word before it.

        WordPiece marks what goes on (``##``), SentencePiece and byte-level BPE mark what begins.
        """
        if any(piece.startswith("##") for piece in self.pieces):
            return np.array([piece.startswith("##") for piece in self.pieces])
        begins = [piece.startswith(_MARKS_OF_WORD_BEGINS) for piece in self.pieces]
        if not any(begins):
            return np.zeros(len(self.pieces), np.bool_)
        special = [piece.startswith(("<", "[")) for piece in self.pieces]
        return np.logical_not(np.logical_or(begins, special))
