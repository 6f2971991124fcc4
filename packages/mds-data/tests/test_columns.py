"""Values beside the tokens: kept, named, and right after every change of the store."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from text_material import small_tokenizer, text

from mds_data import open_store
from mds_data.cli import main
from mds_data.preprocess.columns import ColumnSpec, parse_column
from mds_data.store.append import StoreAppender
from mds_data.store.columns import column_labels, text_code
from mds_data.store.erase import erase_documents
from mds_data.store.merge import merge_stores
from mds_data.store.repack import repack_store
from mds_data.store.verify import verify_store

LANGUAGES = ["en", "de", None, "zh", "en"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("tokenizer.json").write_bytes(small_tokenizer())
    for part in range(2):
        rows = [
            {"text": text(n), "lang": lang, "meta": f"u{n}", "score": n / 4, "stars": n}
            for n, lang in enumerate(LANGUAGES[part:])
        ]
        Path(f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


COLUMNS = ("language=lang", "url=meta:hash", "score:float", "stars:int", "source=@file")


def preprocess(source: str, output: str, *columns: str, workers: str = "1", extra=()) -> int:
    command = ["preprocess", "--input", source, "--tokenizer", "tokenizer.json"]
    command += ["--output", output, "--workers", workers, *extra]
    return main([*command, "--columns", *columns] if columns else command)


def labels(store, name: str) -> list[str | None]:
    known = column_labels(store, name)
    return [known.get(int(code)) for code in store.column(name)]


def test_each_kind_of_column_is_kept(folder: Path) -> None:
    assert preprocess("0.jsonl", "store", *COLUMNS) == 0

    store = open_store("store")
    assert labels(store, "language") == LANGUAGES
    assert labels(store, "source") == ["0.jsonl"] * 5
    assert store.column("score").tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert store.column("stars").tolist() == [0, 1, 2, 3, 4]
    digest = hashlib.blake2b(b"u3", digest_size=8).digest()
    assert int(store.column("url")[3]) == int.from_bytes(digest, "little") == text_code("u3")
    assert column_labels(store, "url") == {}
    assert verify_store("store").sound


def test_any_reader_of_zarr_finds_values_and_texts(folder: Path) -> None:
    import zarr

    preprocess("0.jsonl", "store", *COLUMNS)

    array = zarr.open_group("store", mode="r")["columns/language"]
    assert array.attrs["labels"] == ["de", "en", "zh"]
    assert int(array[1]) == text_code("de")


def test_workers_and_their_number_do_not_matter(folder: Path) -> None:
    for workers in ("1", "2"):
        assert preprocess("*.jsonl", f"s{workers}", *COLUMNS, workers=workers) == 0

    assert open_store("s1").manifest.files == open_store("s2").manifest.files


def test_columns_follow_every_change_of_a_store(folder: Path) -> None:
    for part in range(2):
        preprocess(f"{part}.jsonl", f"s{part}", "language=lang")
    merge_stores(["s0", "s1"], "merged")
    repack_store("merged", "archive", layout="archive")
    with StoreAppender("s0") as appender:
        appender.add([1, 2], columns={"language": text_code("fr")})
        appender.add_labels("language", ["fr"])
        appender.commit()
    erase_documents("s0", [1], reason="asked")

    for name in ("merged", "archive"):
        assert labels(open_store(name), "language") == [*LANGUAGES, *LANGUAGES[1:]]
    assert labels(open_store("s0"), "language") == ["en", None, None, "zh", "en", "fr"]
    assert verify_store("s0").sound


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ("lang:int", "line 1: 'lang' holds str 'en', not a whole number"),
        ("score:int", "line 1: 'score' holds float '0.0', not a whole number"),
        ("other:int", "line 1: 'other' holds nothing, not a whole number"),
        ("lang:float", "line 1: 'lang' holds str 'en', not a number"),
    ],
)
def test_a_value_that_does_not_fit_is_named_or_skipped(
    folder: Path, capsys: pytest.CaptureFixture[str], column: str, said: str
) -> None:
    assert preprocess("0.jsonl", "store", column) == 3
    assert said in capsys.readouterr().err
    assert preprocess("0.jsonl", "store", column, extra=["--on-error", "skip"]) in {0, 3}
    assert "without a fit value for a column" in capsys.readouterr().err


def test_too_many_texts_are_no_categories(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"text": "a", "url": f"u{n}"} for n in range(10_001)]
    Path("many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert preprocess("many.jsonl", "store", "url") == 3

    assert "too many for categories; keep url:hash instead" in capsys.readouterr().err
    assert not Path("store").exists()


@pytest.mark.parametrize("text", ["", "a b", "a:what", "a/b", "=x", "a=:int"])
def test_a_misspelt_column_is_wrong_usage(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    assert preprocess("0.jsonl", "store", text) == 2
    assert "NAME=MEMBER:KIND" in capsys.readouterr().err


def test_one_name_twice_is_wrong_usage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preprocess("0.jsonl", "store", "a=lang", "a=meta") == 2
    assert "one name twice" in capsys.readouterr().err


def test_a_column_spells_name_member_and_kind() -> None:
    assert parse_column("url=page_url:hash") == ColumnSpec(
        name="url", member="page_url", kind="hash"
    )
    assert parse_column("language").dtype == np.dtype("<u8")
