"""Parallel text to stores of pairs: alignment, filters, formats."""

import json

import numpy as np
import pytest
from text_material import byte_tokenizer, golden

from mds_data import open_store
from mds_data.cli import main


@pytest.fixture
def tokenizer(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(byte_tokenizer())
    return path


def pairs_of(path):
    """The texts of all pairs of a store made by the byte tokenizer."""
    with open_store(path) as store:
        assert store.doc_sentences.tolist() == [2] * len(store)
        lengths = store.sentence_length.reshape(-1, 2)
        return [
            (bytes(document[:length].tolist()), bytes(document[length:].tolist()))
            for document, (length, _) in zip(store, lengths.tolist(), strict=True)
        ]


def write(path, data):
    path.write_bytes(data)
    return str(path)


def run(tmp_path, tokenizer, *arguments, workers=1):
    return main(
        [
            "preprocess-nmt",
            *map(str, arguments),
            "--tokenizer",
            str(tokenizer),
            "--output",
            str(tmp_path / "store"),
            "--workers",
            str(workers),
        ]
    )


def files_of_case(name):
    folder = golden("cases") / "B10" / name
    return "--source", folder / "train.src", "--target", folder / "train.tgt"


@pytest.mark.parametrize("name", ["odd_breaks", "crlf", "nul", "blank"])
def test_pairs_of_bug_reports_stay_together(tmp_path, tokenizer, name):
    folder = golden("cases") / "B10" / name
    cut = [
        (folder / f"train.{side}").read_bytes().removesuffix(b"\n").split(b"\n")
        for side in ("src", "tgt")
    ]
    expected = [
        (source.removesuffix(b"\r"), target)
        for source, target in zip(*cut, strict=True)
        if source.strip() and target.strip()
    ]

    assert run(tmp_path, tokenizer, *files_of_case(name)) == 0

    assert pairs_of(tmp_path / "store") == expected


def test_files_of_unlike_length_are_refused_before_writing(tmp_path, tokenizer, capsys):
    source = write(tmp_path / "a.src", b"1\n2\n3\n4\n5\n")
    target = write(tmp_path / "a.tgt", b"1\n2\n3\n4\n")

    assert run(tmp_path, tokenizer, "--source", source, "--target", target) == 3

    message = capsys.readouterr().err
    assert f"{source} has 5 lines and {target} has 4" in message
    assert f"line 5 of {source} has no partner" in message
    assert not (tmp_path / "store").exists()


def test_filters_drop_whole_pairs_and_say_which(tmp_path, tokenizer, capsys):
    lines = [b"abcd\tabcd", b"a\tabcd", b"abcdefghij\tabcdefghi", b"ab\t ", b"abc\tabcdef", b""]
    path = write(tmp_path / "pairs.tsv", b"\n".join(lines))
    report = tmp_path / "report.jsonl"

    filters = ["--min-length", 2, "--max-length", 9, "--max-ratio", 1.5]
    assert run(tmp_path, tokenizer, "--input", path, *filters, "--report", report) == 0

    assert pairs_of(tmp_path / "store") == [(b"abcd", b"abcd")]
    dropped = [json.loads(line) for line in report.read_text().splitlines()]
    assert [(drop["line"], drop["kind"]) for drop in dropped] == [
        (2, "short"),
        (3, "long"),
        (4, "empty"),
        (5, "ratio"),
    ]
    assert "dropped 1 of unlike lengths" in capsys.readouterr().err


def test_json_members_may_lie_inside_objects(tmp_path, tokenizer):
    lines = [{"translation": {"en": "one", "de": "eins"}}, {"translation": {"en": "2", "de": "z"}}]
    path = write(tmp_path / "p.jsonl", b"".join(json.dumps(x).encode() + b"\n" for x in lines))
    keys = ["--source-key", "translation.en", "--target-key", "translation.de"]

    assert run(tmp_path, tokenizer, "--input", path, *keys) == 0

    assert pairs_of(tmp_path / "store") == [(b"one", b"eins"), (b"2", b"z")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"one column", "line 2: 1 columns"),
        (b"a\tb\tc", "line 2: 3 columns"),
        (b"a\t\xff", "line 2: not UTF-8 at byte 1"),
    ],
)
def test_a_broken_line_is_named_or_skipped(tmp_path, tokenizer, capsys, line, reason):
    path = write(tmp_path / "p.tsv", b"x\ty\n" + line + b"\nv\tw\n")

    assert run(tmp_path, tokenizer, "--input", path) == 3
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "store").exists()

    assert run(tmp_path, tokenizer, "--input", path, "--on-error", "skip") == 0
    assert pairs_of(tmp_path / "store") == [(b"x", b"y"), (b"v", b"w")]


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["--source", "a"], 2, "give either two files"),
        (["--input", "a.txt"], 3, "no such input file"),
        (["--input", "there.txt"], 3, "name two files by --source and --target"),
        (["--source", "there.txt", "--target", "there.txt"], 3, "named as source and as target"),
        (["--input", "there.tsv", "--max-ratio", "0.5"], 2, "max_ratio"),
        (["--input", "there.tsv", "--min-length", "0"], 2, "min_length"),
        (["--input", "there.tsv", "--max-length", "1", "--min-length", "2"], 2, "max_length"),
        (["--input", "there.tsv", "--min-length", "9"], 3, "nothing is left"),
    ],
)
def test_wrong_requests_are_one_sentence(
    tmp_path, tokenizer, monkeypatch, capsys, arguments, code, reason
):
    write(tmp_path / "there.txt", b"x\n")
    write(tmp_path / "there.tsv", b"x\ty\n")
    monkeypatch.chdir(tmp_path)

    assert run(tmp_path, tokenizer, *arguments) == code

    assert reason in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_the_workers_do_not_show_in_the_store(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    random = np.random.default_rng(0)
    lines = [b"x" * n + b"\t" + b"y" * m for n, m in random.integers(0, 30, (5000, 2)).tolist()]
    path = write(tmp_path / "p.tsv", b"\n".join(lines))

    manifests = []
    for workers in (1, 2):
        assert run(tmp_path, tokenizer, "--input", path, "--overwrite", workers=workers) == 0
        manifests.append((tmp_path / "store" / "manifest.json").read_bytes())

    assert manifests[0] == manifests[1]
