"""What every tokenizer here offers, and how one is described before it is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from numpy.typing import NDArray

from mds_data.errors import DataError

__all__ = [
    "ModelFile",
    "TokenIds",
    "Tokenizer",
    "TokenizerError",
    "TokenizerKind",
    "TokenizerSpec",
    "read_model_file",
]

TokenizerKind = Literal[
    "tokenizers-json",
    "gpt2-bpe",
    "bert-wordpiece",
    "sentencepiece",
    "sentencepiece-megatron",
    "null",
]

TokenIds: TypeAlias = list[int] | NDArray[Any]
"""Ids of one text."""

_LARGEST_MODEL_FILE = 256 * 1024 * 1024


class TokenizerError(DataError):
    """A tokenizer file, or the choice of its end-of-document token, can't be used."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """The one file that makes this tokenizer again, kept inside the store."""

    name: str
    """``tokenizer.json`` or ``tokenizer.model``."""
    content: bytes = field(repr=False)

    @property
    def sha256(self) -> str:
        """Hexadecimal digest of the content."""
        return hashlib.sha256(self.content).hexdigest()


class Tokenizer(Protocol):
    """Text to token ids and back.

    Text is only text: a special token's spelling inside a document becomes ordinary tokens, unless
    the tokenizer was loaded with ``allow_special``. No beginning or end marks are added.
    """

    @property
    def kind(self) -> str:
        """How its file is read: a TokenizerKind."""

    @property
    def name(self) -> str:
        """What a person calls it, such as ``GPT2BPETokenizer``."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""

    @property
    def eod_id(self) -> int | None:
        """Id of the token that ends a document, or None if there is none."""

    @property
    def file(self) -> ModelFile:
        """The file to keep beside the tokens."""

    @property
    def fingerprint(self) -> str:
        """sha256 of what decides the ids; equal fingerprints give equal ids."""

    @property
    def splits_at_words(self) -> bool:
        """True if no token crosses a space between words, so a huge text may be cut there."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text; ValueError if one can't be encoded."""

    def encode_ids(self, texts: Sequence[str]) -> Sequence[TokenIds]:
        """Return the same in the form that costs least: lists, or arrays of any whole numbers."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""

    def pieces(self) -> list[str]:
        """Return the spelling of every id, as its vocabulary has it; "" where an id has none."""

    def special_ids(self) -> dict[str, int]:
        """Return the ids of the marks that no text turns into, by spelling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSpec:
    """How to load a tokenizer. Small and picklable: worker processes load their own."""

    kind: TokenizerKind
    path: Path | None = None
    """Model file, vocabulary file, or a folder that holds one."""
    merges: Path | None = None
    """Merges of GPT-2 BPE."""
    eod_token: str | None = None
    """Spelling of the token that ends a document; found by its usual names when left out."""
    vocab_size: int | None = None
    """Of the null tokenizer, end-of-document id not counted."""
    lower_case: bool = True
    """Of BERT WordPiece."""
    extra_ids: int = 0
    """T5's sentinels ``<extra_id_0>``..., after the vocabulary of BERT or SentencePiece."""
    allow_special: bool = False
    """Let the spelling of a special token in a text become that token."""

    def __post_init__(self) -> None:
        if self.kind == "null":
            if self.vocab_size is None or self.vocab_size < 1:
                raise TokenizerError("the null tokenizer needs a vocabulary size of at least 1.")
        elif self.path is None:
            raise TokenizerError(f"a {self.kind} tokenizer needs its file.")
        if self.kind == "gpt2-bpe" and self.merges is None:
            raise TokenizerError("GPT-2 BPE needs two files: the vocabulary and the merges.")
        if self.extra_ids < 0:
            raise TokenizerError(f"extra ids ({self.extra_ids}) must not be negative.")


def read_model_file(path: Path) -> bytes:
    """Return a model file's bytes, or say what is wrong with it."""
    if path.is_dir():
        raise TokenizerError(f"{path} is a folder; name the tokenizer's file inside it.")
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such tokenizer file. Nothing is downloaded here: fetch the model's "
            f"tokenizer.json (or tokenizer.model) yourself and give its path."
        )
    if not path.is_file():  # a device has no size, and no end
        raise TokenizerError(f"{path} is a device or a pipe; name the tokenizer's file.")
    size = path.stat().st_size
    if size > _LARGEST_MODEL_FILE:
        raise TokenizerError(
            f"{path} has {size} bytes, which is no tokenizer file "
            f"(at most {_LARGEST_MODEL_FILE} are read)."
        )
    return path.read_bytes()
