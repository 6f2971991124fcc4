"""A huge record, read in pieces, is the record that is read at once."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_material import byte_tokenizer, small_tokenizer, text

from mds_data.preprocess import batches, inputs, long_record, source
from mds_data.preprocess.batches import Batch
from mds_data.preprocess.columns import ColumnSpec
from mds_data.preprocess.encode import Encoder
from mds_data.preprocess.inputs import InputError, InputReader, Record, find_inputs
from mds_data.preprocess.long_record import LongText, long_members
from mds_data.preprocess.records import RecordError
from mds_data.preprocess.workers import map_in_order
from mds_data.tokenizers import load_tokenizer, spec_of_file

UINT16 = np.dtype("<u2")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything counts as long, and is cut into small pieces."""
    monkeypatch.setattr(long_record, "_PIECE", 16)
    monkeypatch.setattr(long_record, "_LONG_STRING", 4)
    monkeypatch.setattr(batches, "LONG_RECORD", 1)


def whole(value: object) -> object:
    return value.text() if isinstance(value, LongText) else value


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=5), st.booleans(), st.sampled_from([None, 1]))
def test_members_are_those_of_the_json_module(
    members: dict[str, object], ascii_only: bool, indent: int | None
) -> None:
    long_record._LONG_STRING, usual = 4, long_record._LONG_STRING
    data = json.dumps(members, ensure_ascii=ascii_only, indent=indent).encode()
    try:
        found = {key: whole(value) for key, value in long_members(data).items()}
    finally:
        long_record._LONG_STRING = usual

    assert found == members


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[1]", b"7", b"{", b'{"a"', b'{"a":', b'{"a":1', b'{"a":1,', b'{"a":1,}', b'{"a" 1}',
        b'{"a":1} x', b'{"a":tru}', b'{"a":[1,}', b'{"a":[[1]', b'{"a":"b', b'{a:1}', b'{"a":01}',
        b'{"a":"\\x"}', b'{"a":"\n"}', b'{"a":"\xff"}', b'{"a":"\\ud800 b"}', b"[" * 100_000,
        b'{"a":' + b"[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(RecordError):
        [whole(value) for value in long_members(data).values()]


@settings(max_examples=200, deadline=None)
@given(st.text(), st.integers(1, 40))
def test_pieces_of_a_string_are_the_string(content: str, piece: int) -> None:
    long_record._PIECE, usual = piece, long_record._PIECE
    try:
        for ascii_only in (False, True):
            data = json.dumps(content, ensure_ascii=ascii_only).encode()
            found = LongText(data, 1, len(data) - 1, escaped=True).text()
            assert found == content
        data = content.encode()
        plain = LongText(data, 0, len(data), escaped=False).text()
        assert plain == content.replace("\r\n", "\n")
    finally:
        long_record._PIECE = usual


def encoder(tmp_path: Path, content: bytes, **options) -> Encoder:
    (tmp_path / "tokenizer.json").write_bytes(content)
    tokenizer = load_tokenizer(spec_of_file(tmp_path / "tokenizer.json"))
    return Encoder(tokenizer, keys=["text", "b"], append_eod=True, dtype=UINT16, **options)


RECORDS = [
    {"text": text(1, words=900), "b": "short", "lang": "en"},
    {"text": 'é\u2028 \0 😀 "quoted" \\ ' * 30, "b": "", "lang": None},
    {"text": "", "b": "x"},
    {"text": 7, "b": text(2)},
    {"b": text(3), "lang": ["no"]},
]


@pytest.mark.parametrize("content", [small_tokenizer(), byte_tokenizer()])
@pytest.mark.parametrize("record", RECORDS)
def test_a_long_record_becomes_what_a_short_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, record: dict, small: None
) -> None:
    columns = [ColumnSpec(name="lang", member="lang", kind="category")]
    encode = encoder(tmp_path, content, columns=columns)
    data = json.dumps(record).encode()

    long = encode(Batch("f", "jsonl", [Record(3, data)]))
    monkeypatch.setattr(batches, "LONG_RECORD", 10**9)
    short = encode(Batch("f", "jsonl", [Record(3, data)]))

    assert long.problems == short.problems
    for key, expected in short.documents.items():
        found = long.documents[key]
        for name in ("tokens", "lengths", "sentence_lengths", "doc_sentences"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
            assert getattr(found, name).dtype == getattr(expected, name).dtype
        np.testing.assert_array_equal(found.columns["lang"], expected.columns["lang"])
        assert found.labels == expected.labels


@pytest.mark.parametrize("data", [b"a\r\nb  c\n" * 40, b"\xff" * 40, b"{" * 20])
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_long_texts_and_broken_records_are_the_same_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, kind: str, small: None
) -> None:
    encode = encoder(tmp_path, byte_tokenizer())

    long = encode(Batch("f", kind, [Record(3, data)]))
    monkeypatch.setattr(batches, "LONG_RECORD", 10**9)
    short = encode(Batch("f", kind, [Record(3, data)]))

    assert [(p.kind, p.line) for p in long.problems] == [(p.kind, p.line) for p in short.problems]
    np.testing.assert_array_equal(long.documents["text"].tokens, short.documents["text"].tokens)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_long_line_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: bytes, mark: bytes
) -> None:
    monkeypatch.setattr(inputs, "_USUAL_LINE", 16)
    lines = [b"x" * n for n in (15, 16, 17, 31, 32, 33, 100, 0, 3)]
    path = tmp_path / "in.jsonl"
    path.write_bytes(mark + (end or b"\n").join(lines) + end)

    (file,) = find_inputs([path])
    found = [(record.line, bytes(record.data)) for record in InputReader(file).records()]

    assert found == list(enumerate(lines, start=1))


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_USUAL_LINE", 16)
    monkeypatch.setattr(inputs, "LONGEST_RECORD", 100)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 101)

    (file,) = find_inputs([path])
    with pytest.raises(InputError, match="line 1: the line is longer than 100 bytes"):
        list(InputReader(file).records())


def test_a_huge_record_goes_alone_and_is_worked_on_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "LONG_RECORD", 50)
    monkeypatch.setattr(source, "_BATCH_BYTES", 50)
    monkeypatch.setattr(batches, "LONG_RECORD", 50)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join([b"a", b"b", b"c" * 60, b"d", b"e" * 60]))

    found = list(source.Source(find_inputs([path])))
    here = map_in_order([1, 2, 30, 4], make=_process, workers=2, here=lambda item: item > 9)

    assert [len(batch.records) for batch in found] == [2, 1, 1, 1]
    assert [batch.is_long for batch in found] == [False, True, False, True]
    processes = list(here)
    assert [item for item, _ in processes] == [1, 2, 30, 4]
    assert [process == __import__("os").getpid() for _, process in processes] == [
        False,
        False,
        True,
        False,
    ]


def _process():
    return _told


def _told(item: int) -> tuple[int, int]:
    return item, __import__("os").getpid()


def test_bytes_of_a_stream_are_read_once() -> None:
    stream = io.BytesIO(b"y" * 100 + b"\nz")

    assert bytes(inputs._long_line(stream.read(10), stream, Path("f"), number=2)) == b"y" * 100
