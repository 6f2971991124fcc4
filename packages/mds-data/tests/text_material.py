"""What the tests of text share: tiny tokenizers, files, golden folders."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mds_data.tokenizers.train import train_tokenizer

_SENTENCE = (
    "the store keeps every token of a document and the reader finds it again without a copy "
    "because a shard is the array and a chunk carries its own checksum so that a flipped bit "
    "is an error and never a silent change of what the model learns from the text it reads"
)
WORDS = _SENTENCE.split()


def golden(kind: str) -> Path:
    """Return shared/fixtures or shared/cases, or skip the test."""
    named = os.environ.get({"fixtures": "MDS_GOLDEN_DIR", "cases": "MDS_CASES_DIR"}[kind])
    folders = [Path(named)] if named else [p / "shared" / kind for p in Path(__file__).parents]
    found = next((folder for folder in folders if folder.is_dir()), None)
    if found is None:
        pytest.skip(
            f"no golden {kind} here; set MDS_GOLDEN_DIR and MDS_CASES_DIR to test with them"
        )
    return found


def byte_tokenizer() -> bytes:
    """Return a tokenizer.json whose ids are bytes, with 256 for <eod> (the one of the cases)."""
    vocabulary = {letter: byte for byte, letter in _byte_letters().items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eod>"])
    return backend.to_str().encode()


def _byte_letters() -> dict[int, str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    return table | {byte: chr(256 + number) for number, byte in enumerate(others)}


@cache
def small_tokenizer(model: str = "bpe") -> bytes:
    """Return the file of a tokenizer that was trained on a few words."""
    size = {"bpe": 300, "wordpiece": 80, "unigram": 290}[model]
    return train_tokenizer([text(n) for n in range(50)], vocab_size=size, model=model).content


def text(number: int, *, words: int = 40) -> str:
    """Return some words, different ones for each number."""
    return " ".join(WORDS[(number * 7 + k * (number % 5 + 1)) % len(WORDS)] for k in range(words))


def write_jsonl(path: Path, texts: Iterable[str], *, key: str = "text") -> Path:
    """Write texts as JSON lines."""
    path.write_text("".join(json.dumps({key: each}) + "\n" for each in texts), encoding="utf-8")
    return path
