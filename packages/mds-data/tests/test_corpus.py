"""The sample corpus: English, without duplicates, the same every time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mds_data.corpus import is_prose, sample_corpus

MODULE = '''"""Tools for the reader of a very small library that is made for this test."""

# This comment is a paragraph of English that tells why the module is as it is, and it is
# long enough to count as one. It stands before the code that it is about, as comments in
# the library do, and it has to be in the document of the module.

def find(name, *, deep=False):
    """Return the first thing of this name that is in the library, or None."""

class Shelf:
    """A shelf is a row of books that can be read from the left to the right."""

    def first(self):
        """Return the first book of the shelf, which is the one at the left end of it."""
'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "shelves.py").write_text(MODULE)
    (tmp_path / "copy.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text('"""The file is not Python at all, as some are."""\ndef (')
    tests = tmp_path / "test"
    tests.mkdir()
    (tests / "test_shelves.py").write_text('"""This is no part of it."""')
    return tmp_path


def from_library(folder: Path) -> dict[str, str]:
    documents = {each.source: each.text for each in sample_corpus(library=folder)}
    return {name: text for name, text in documents.items() if "copy" in name or "shel" in name}


def test_a_module_and_a_class_are_documents_with_their_functions(library: Path) -> None:
    documents = from_library(library)

    assert documents.keys() == {"module:copy", "class:copy.Shelf"}, "the same text came twice"
    module, shelf = documents["module:copy"], documents["class:copy.Shelf"]
    assert "Tools for the reader" in module
    assert "find(name, *, deep=False)\n\nReturn the first thing" in module
    assert "This comment is a paragraph" in module
    assert shelf.startswith("copy.Shelf\n\nA shelf is a row")
    assert "first(self)\n\nReturn the first book" in shelf


def test_topics_and_built_in_types_are_there(library: Path) -> None:
    sources = {each.source for each in sample_corpus(library=library)}

    assert {"topic:FLOAT", "topic:assert"} & sources
    assert "class:builtins.dict" in sources


def test_another_seed_gives_the_same_documents_in_another_order(library: Path) -> None:
    first, second = (list(sample_corpus(library=library, seed=seed)) for seed in (1, 2))

    assert first != second
    assert sorted(d.source for d in first) == sorted(d.source for d in second)


def test_the_real_corpus_has_megabytes_and_is_the_same_in_another_process() -> None:
    code = (
        "import hashlib; from mds_data.corpus import sample_corpus; "
        "texts = [d.text for d in sample_corpus()]; "
        "print(len(texts), len(set(texts)), sum(map(len, texts)), "
        "hashlib.sha256(''.join(texts).encode()).hexdigest())"
    )

    runs = [
        subprocess.run(
            [sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True
        ).stdout
        for _ in range(2)
    ]

    documents, different, characters, _ = runs[0].split()
    assert runs[0] == runs[1]
    assert documents == different
    assert int(documents) > 500
    assert int(characters) > 1_000_000


def test_progress_ends_at_the_total(library: Path) -> None:
    seen: list[tuple[int, int]] = []

    list(sample_corpus(library=library, on_progress=lambda done, total: seen.append((done, total))))

    assert seen[-1] == (3, 3)


@pytest.mark.parametrize(
    ("text", "english"),
    [
        ("This is a sentence of the kind that a person would write in a comment.", True),
        ("x = foo(bar[1:2], baz) ** 2 + qux // 3; y = [q for q in z]; assert x != y", False),
        ("0x00 0x01 0x02 0x03 0x04 0x05 0x06 0x07 0x08 0x09 0x0a 0x0b 0x0c 0x0d", False),
    ],
)
def test_prose_is_told_from_code_and_tables(text: str, english: bool) -> None:
    assert is_prose(text) is english
