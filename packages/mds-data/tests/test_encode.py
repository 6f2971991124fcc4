"""Encoding batches: what is kept, what is reported, and that huge documents may be cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_material import byte_tokenizer, small_tokenizer, text

from mds_data.preprocess import records
from mds_data.preprocess.encode import Batch, EncodedBatch, Encoder
from mds_data.preprocess.inputs import Record
from mds_data.preprocess.long_text import LONG, encode_long
from mds_data.tokenizers import Tokenizer, load_tokenizer, spec_of_file

UINT16 = np.dtype("<u2")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(byte_tokenizer())
    return load_tokenizer(spec_of_file(path))


def trained(folder: Path, model: str) -> Tokenizer:
    path = folder / ("tokenizer.model" if model == "unigram" else "tokenizer.json")
    path.write_bytes(small_tokenizer(model))
    return load_tokenizer(spec_of_file(path))


def encode(
    tokenizer: Tokenizer, *lines: bytes, keys: tuple[str, ...] = ("text",), eod: bool = True
) -> EncodedBatch:
    encoder = Encoder(tokenizer, keys=keys, append_eod=eod, dtype=UINT16)
    lines_read = [Record(number, line) for number, line in enumerate(lines, start=1)]
    return encoder(Batch("in.jsonl", "jsonl", lines_read))


@pytest.mark.parametrize(
    ("line", "kind", "detail"),
    [
        (b'{"text": "x"', "broken", "not JSON"),
        (b'[{"text": "x"}]', "broken", "a JSON array, not an object"),
        (b"[1,", "broken", "looks like one JSON array"),
        (b'"text"', "broken", "a JSON string, not an object"),
        (b'{"text": "\xff"}', "broken", "not UTF-8 at byte 11"),
        (b"[" * 100_000, "broken", "nested too deeply"),
        (b'{"text": ' + b"9" * 5000 + b"}", "broken", "not JSON"),
        (b'{"body": "x", "id": 1}', "no-key", "no key 'text' (it has: body, id)"),
        (b"{}", "no-key", "no key 'text' (it has: none)"),
        (b'{"text": null}', "not-text", "'text' holds null, not text"),
        (b'{"text": 5}', "not-text", "'text' holds number, not text"),
        (b'{"text": "a\\ud800b"}', "surrogate", "half a surrogate pair (U+D800)"),
        (b'{"text": ""}', "empty", "an empty document"),
        (b"  ", "empty", "an empty line"),
    ],
)
def test_a_record_without_text_is_reported_with_its_line(
    tokenizer: Tokenizer, line: bytes, kind: str, detail: str
) -> None:
    batch = encode(tokenizer, b'{"text": "a"}', line, b'{"text": "b"}')

    assert batch.documents["text"].tokens.tolist() == [97, 256, 98, 256]
    assert [(p.line, p.kind) for p in batch.problems] == [(2, kind)]
    assert detail in batch.problems[0].detail
    assert str(batch.problems[0]).startswith("in.jsonl, line 2: ")


def test_nul_and_a_whole_surrogate_pair_are_text(tokenizer: Tokenizer) -> None:
    batch = encode(tokenizer, b'{"text": "n\\u0000"}', b'{"text": "\\ud83d\\ude00"}', eod=False)

    assert batch.documents["text"].tokens.tolist() == [110, 0, 0xF0, 0x9F, 0x98, 0x80]
    assert [(p.line, p.kind) for p in batch.problems] == [(1, "nul")]


def test_several_keys_are_separate_documents(tokenizer: Tokenizer) -> None:
    batch = encode(tokenizer, b'{"a": "x", "b": "yy"}', b'{"a": "z"}', keys=("a", "b"))

    assert batch.documents["a"].lengths.tolist() == [2, 2]
    assert batch.documents["b"].lengths.tolist() == [3]
    assert [(p.line, p.kind) for p in batch.problems] == [(2, "no-key")]


def test_a_text_that_gives_no_token_is_empty(tmp_path: Path) -> None:
    batch = encode(trained(tmp_path, "wordpiece"), b'{"text": "   "}', b'{"text": "the"}')

    assert batch.documents["text"].lengths.tolist() == [2]
    assert [(p.line, p.kind) for p in batch.problems] == [(1, "empty")]


class Choosy:
    """Refuses a batch in which any text holds a q."""

    def __init__(self, inner: Tokenizer) -> None:
        self.__dict__ |= vars(inner)
        self.inner = inner

    def encode_batch(self, texts):
        if any("q" in each for each in texts):
            raise ValueError("no q, please")
        return self.inner.encode_batch(texts)

    encode_ids = encode_batch


def test_a_text_that_the_tokenizer_refuses_does_not_take_its_neighbours_along(
    tokenizer: Tokenizer,
) -> None:
    batch = encode(Choosy(tokenizer), *(b'{"text": "%c"}' % letter for letter in b"pqr"))

    assert batch.documents["text"].tokens.tolist() == [112, 256, 114, 256]
    assert [(p.line, p.kind, p.detail) for p in batch.problems] == [(2, "refused", "no q, please")]


def test_a_huge_document_is_mentioned_and_kept_whole(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "HUGE", 2**20)
    size = 3 * 2**19
    batch = encode(tokenizer, b'{"text": "%b"}' % (b"ab " * (size // 3)), b'{"text": "c"}')

    assert batch.documents["text"].lengths.tolist() == [size + 1, 2]
    assert [(p.line, p.kind) for p in batch.problems] == [(1, "huge")]


@pytest.mark.parametrize("model", ["bpe", "wordpiece", "unigram"])
def test_pieces_of_a_long_text_have_the_ids_of_the_whole(tmp_path: Path, model: str) -> None:
    tokenizer = trained(tmp_path, model)
    long = "\n\n".join(text(n, words=1 + n % 60) + ". 1 2, (x)" for n in range(3000))

    pieces = encode_long(long, tokenizer=tokenizer, dtype=UINT16, piece=2000)

    assert tokenizer.splits_at_words
    assert pieces.tolist() == tokenizer.encode_batch([long])[0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(["the", "a", "ü", "中", " ", "  ", "\n", "\u0301", ".", "'s", "1", "🙂"]),
        min_size=50,
        max_size=400,
    )
)
@pytest.mark.parametrize("model", ["bpe", "wordpiece", "unigram"])
def test_any_text_may_be_cut(
    tmp_path_factory: pytest.TempPathFactory, model: str, parts: list[str]
) -> None:
    tokenizer = trained(tmp_path_factory.mktemp("t"), model)
    whole = "".join(parts)

    pieces = encode_long(whole, tokenizer=tokenizer, dtype=UINT16, piece=20)

    assert pieces.tolist() == tokenizer.encode_batch([whole])[0]


def test_a_tokenizer_whose_tokens_may_cross_words_gets_the_text_whole(
    tokenizer: Tokenizer,
) -> None:
    calls: list[int] = []

    class Counting(Choosy):
        def encode_batch(self, texts):
            calls.extend(map(len, texts))
            return self.inner.encode_batch(texts)

    encode_long("ab " * LONG, tokenizer=Counting(tokenizer), dtype=UINT16)

    assert calls == [3 * LONG]
