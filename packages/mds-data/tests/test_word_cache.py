"""The word cache gives the library's ids: for every safe character, for any text."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from text_material import text
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from mds_data.tokenizers.word_cache import SAFE, WordCache, word_cache_for

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")


@cache
def backend(kind: str) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt2")
    if kind == "gpt2":
        made.pre_tokenizer = byte_level
    else:
        pattern = Regex(LLAMA3 if kind == "llama3" else QWEN2)
        split = pre_tokenizers.Split(pattern, behavior="isolated", invert=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    if kind == "qwen2":
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator([text(n) for n in range(50)], trainer)
    made.encode_special_tokens = True
    return made


def word_cache(kind: str) -> WordCache:
    made = backend(kind)
    found = word_cache_for(json.loads(made.to_str()), backend=made)
    assert found is not None
    return found


def by_library(kind: str, *texts: str) -> list[list[int]]:
    return [backend(kind).encode(each, add_special_tokens=False).ids for each in texts]


AWKWARD = [
    *("the", " store", "'s", "'LL", " ", "\n", "\r", "\t", "12", "½", "e\u0301", "\x1c", "_", "-"),
    *("<|endoftext|>", "\u017f", "\u2028", "!?", "中文", "🙂", "\xa0", "don't", "I'M"),
]
KINDS = pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen2"])


@KINDS
def test_every_safe_character_cuts_words_as_in_the_library(kind: str) -> None:
    safe = re.compile(f"[{SAFE}]")
    numbers = (n for n in range(0x110000) if not 0xD800 <= n < 0xE000)
    letters = [letter for letter in map(chr, numbers) if safe.match(letter)]
    words, library = word_cache(kind).words, backend(kind).pre_tokenizer.pre_tokenize_str

    assert len(letters) > 30_000
    for start in range(0, len(letters), 50):
        some = letters[start : start + 50]
        whole = "".join(f"a{c}1{c}-{c} {c}'S\n{c}\t  {c}12345{c}" for c in some)
        assert words(whole) == [whole[first:last] for _, (first, last) in library(whole)]


@KINDS
@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text(max_size=60), max_size=5))
def test_any_text_has_the_ids_of_the_library(kind: str, texts: list[str]) -> None:
    assert word_cache(kind).encode_batch(texts) == by_library(kind, *texts)


@KINDS
@settings(max_examples=100, deadline=None)
@given(whole=st.text(st.sampled_from("aZ09 _-.'sLl\n\r\t\x0b\x00\x7f"), max_size=40))
def test_any_ascii_text_is_cut_as_by_the_library(kind: str, whole: str) -> None:
    assert word_cache(kind).encode_batch([whole]) == by_library(kind, whole)


@KINDS
@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(AWKWARD),
        max_size=30,
    )
)
def test_awkward_texts_have_the_ids_of_the_library(kind: str, parts: list[str]) -> None:
    whole = "".join(parts)

    assert word_cache(kind).encode_batch([whole]) == by_library(kind, whole)


def test_a_full_cache_is_emptied_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mds_data.tokenizers.word_cache._MOST_WORDS", 10)
    texts = [text(n) for n in range(30)]

    assert word_cache("gpt2").encode_batch(texts) == by_library("gpt2", *texts)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"added_tokens": [{"content": "the", "special": False}]},
        {"model": {"type": "Unigram"}},
    ],
)
def test_other_tokenizers_are_left_to_the_library(change: dict[str, object]) -> None:
    made = backend("gpt2")

    assert word_cache_for(json.loads(made.to_str()) | change, backend=made) is None


def test_a_library_that_cuts_words_otherwise_is_noticed() -> None:
    made = backend("llama3")
    claimed = json.loads(backend("gpt2").to_str())

    assert word_cache_for(claimed, backend=made) is None
