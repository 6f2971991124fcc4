"""Reading inputs: which files, which lines, what a damaged file says."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
from pathlib import Path

import pytest
import zstandard

from mds_data.preprocess import inputs
from mds_data.preprocess.inputs import InputError, InputReader, find_inputs

LINES = b'{"text": "one"}\n{"text": "two"}\r\n\n{"text": "three"}'
WRITERS = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def read(path: Path, **options: object) -> list[tuple[int, bytes]]:
    (file,) = find_inputs([path])
    return [(r.line, r.data) for r in InputReader(file, **options).records()]


@pytest.mark.parametrize("suffix", list(WRITERS))
def test_lines_are_the_same_in_every_compression(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"in.jsonl{suffix}"
    path.write_bytes(WRITERS[suffix](LINES))
    (file,) = find_inputs([path])
    reader = InputReader(file)

    records = [(r.line, r.data) for r in reader.records()]

    assert records == [
        (1, b'{"text": "one"}'),
        (2, b'{"text": "two"}'),
        (3, b""),
        (4, b'{"text": "three"}'),
    ]
    assert reader.bytes_read == path.stat().st_size
    assert reader.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_second_gzip_member_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(b"1\n") + gzip.compress(b"2\n"))

    assert [data for _, data in read(path)] == [b"1", b"2"]


def test_zstd_is_read_frame_after_frame_and_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl.zst"
    # A frame of one raw block, by hand: magic, header (single segment, size 2), block, content.
    frame = b"\x28\xb5\x2f\xfd\x20\x02\x11\x00\x00"
    path.write_bytes(frame + b"a\n" + frame + b"b\n")

    assert read(path) == [(1, b"a"), (2, b"b")]

    path.write_bytes(b"no zstd at all")
    with pytest.raises(InputError, match=r"in\.jsonl\.zst is damaged or cut"):
        read(path)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("fault", ["cut", "noise"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, suffix: str, fault: str) -> None:
    whole = WRITERS[suffix](LINES * 1000)
    path = tmp_path / f"in.jsonl{suffix}"
    path.write_bytes(whole[: len(whole) // 2] if fault == "cut" else b"noise")

    with pytest.raises(InputError, match="damaged or cut") as caught:
        read(path)

    assert str(path) in str(caught.value)


def test_only_lf_ends_a_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('"a\u2028b\x0bc\x0cd\x1ce\x85f\rg"\n"h"\n', newline="", encoding="utf-8")

    assert [number for number, _ in read(path)] == [1, 2]


def test_a_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{}\n")

    assert read(path) == [(1, b"{}")]


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("document", [(1, b"a\nb\n\n\nc\n")]),
        ("paragraph", [(1, b"a\nb"), (5, b"c")]),
        ("line", [(1, b"a"), (2, b"b"), (3, b""), (4, b""), (5, b"c")]),
    ],
)
def test_a_text_file_is_cut_into_the_unit_asked_for(
    tmp_path: Path, unit: str, expected: list[tuple[int, bytes]]
) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b"a\nb\n\n\nc\n")

    assert read(path, text_unit=unit) == expected


def test_a_line_too_long_to_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "LONGEST_RECORD", 100)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"short\n" + b"x" * 101)

    with pytest.raises(InputError, match="line 2: the line is longer than 100 bytes"):
        read(path)
    with pytest.raises(InputError, match="--text-unit paragraph"):
        read(path.rename(tmp_path / "in.txt"))


def test_globs_are_sorted_and_paths_keep_their_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt.gz", "[odd].jsonl"):
        (tmp_path / name).write_bytes(b"")

    found = find_inputs([tmp_path / "c.txt.gz", tmp_path / "?.jsonl", tmp_path / "[odd].jsonl"])

    assert [file.path.name for file in found] == ["c.txt.gz", "a.jsonl", "b.jsonl", "[odd].jsonl"]
    assert [file.format for file in found] == ["text", "jsonl", "jsonl", "jsonl"]


def test_what_is_not_there_or_named_twice_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"")

    with pytest.raises(FileNotFoundError, match="no such input file"):
        find_inputs([tmp_path / "nowhere.jsonl"])
    with pytest.raises(FileNotFoundError, match="no file matches"):
        find_inputs([tmp_path / "*.txt"])
    with pytest.raises(InputError, match="is a folder"):
        find_inputs([tmp_path])
    with pytest.raises(InputError, match="named twice"):
        find_inputs([path, tmp_path / "*.jsonl"])
