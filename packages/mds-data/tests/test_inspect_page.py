"""The page of a store is whole by itself, and nothing in a store can make it do anything."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from text_material import byte_tokenizer, small_tokenizer, text

from mds_data import open_store, write_store
from mds_data.cli import main
from mds_data.commands.inspect_page import page
from mds_data.store.inspection import inspect_store

ATTACK = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[2J\u202e&amp;'\""


class Tags(HTMLParser):
    """Collects tags, attributes and texts."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("tokenizer.json").write_bytes(small_tokenizer())
    return tmp_path


def preprocess(rows: list[dict], *options: str) -> None:
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["preprocess", "--input", "in.jsonl", "--tokenizer", "tokenizer.json", "--append-eod"]
    assert main([*command, "--workers", "1", "--output", "store", *options]) == 0


def test_the_page_shows_what_the_store_holds(folder: Path) -> None:
    rows = [{"text": text(n), "lang": "en" if n % 3 else "de", "q": n / 2} for n in range(9)]
    preprocess(rows, "--columns", "lang", "q:float", "--split", "90,10,0")

    assert main(["inspect", "store", "--html", "page.html"]) == 0

    shown = Path("page.html").read_text()
    found = Tags(shown)
    words = " ".join(found.texts)
    for expected in ("9 (0 empty", "train 90 %", "in.jsonl", "preprocess", "append_eod"):
        assert expected in words
    assert text(0)[:40] in words
    assert {"de", "en"} <= set(found.texts)
    assert not found.tags & {"script", "link", "img", "iframe"}
    assert not found.attributes & {"src", "href"}


def test_nothing_in_a_store_becomes_markup(folder: Path) -> None:
    Path("tokenizer.json").write_bytes(byte_tokenizer())
    preprocess([{"text": ATTACK, "lang": ATTACK}], "--columns", "lang")
    store = open_store("store")
    found = inspect_store(store)
    provenance = {
        "inputs": [{"path": ATTACK}],
        "transforms": [{"name": ATTACK, "arguments": {ATTACK: ATTACK}}, 7],
    }
    manifest = replace(
        found.manifest,
        uuid=ATTACK,
        provenance=provenance,
        split={ATTACK: (0.0, 1.0)},
        created=ATTACK,
    )

    shown = page(replace(found, path=ATTACK, manifest=manifest), lambda ids: ATTACK, ATTACK)

    parsed = Tags(shown)
    assert "script" not in parsed.tags
    assert "img" not in parsed.tags
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "alert(1)" in " ".join(parsed.texts)
    assert "default-src 'none'" in shown


def test_an_empty_store_and_one_without_tokenizer_have_pages(folder: Path) -> None:
    write_store("none", [], vocab_size=10)
    write_store("ids", [[1, 2, 3], []], vocab_size=10)

    for name in ("none", "ids"):
        assert main(["inspect", name, "--html", f"{name}.html"]) == 0
        assert main(["inspect", name]) == 0
        assert "<h1>" in Path(f"{name}.html").read_text()


def test_a_page_is_not_overwritten_by_chance(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_store("ids", [[1]], vocab_size=10)
    Path("page.html").write_text("mine")

    assert main(["inspect", "ids", "--html", "page.html"]) == 3
    assert "--overwrite" in capsys.readouterr().err
    assert Path("page.html").read_text() == "mine"


def test_columns_are_told_on_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"text": text(n), "lang": "en\x1b" if n % 3 else None, "id": n} for n in range(6)]
    preprocess(rows, "--columns", "lang", "id:int", "url=lang:hash")
    capsys.readouterr()

    assert main(["inspect", "store"]) == 0

    said = capsys.readouterr().out
    assert "column lang: 2 different uint64" in said
    assert "en\\x1b  4 documents" in said
    assert "(none)" in said
    assert "column id: 6 different int64, 0 to 5" in said
    assert "column url: 2 different hashes" in said


def test_a_store_at_a_url_is_inspected(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fsspec")
    preprocess([{"text": "the store"}])
    capsys.readouterr()

    assert main(["inspect", f"file://{folder}/store"]) == 0

    assert "the store" in capsys.readouterr().out
