"""Sentences: where a stop ends one and where it does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mds_data.preprocess.sentences import split_sentences


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        ("  \n ", []),
        ("One.", ["One."]),
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("Mr. Smith met Dr. Jones. They spoke.", ["Mr. Smith met Dr. Jones.", "They spoke."]),
        ("J. R. Smith wrote it. I read it.", ["J. R. Smith wrote it.", "I read it."]),
        ("It costs 3.5 euros. Cheap.", ["It costs 3.5 euros.", "Cheap."]),
        ("See e.g. Smith (2001), i.e. the book.", ["See e.g. Smith (2001), i.e. the book."]),
        ("He said 'yes.' Then he left.", ["He said 'yes.'", "Then he left."]),
        ('Is it so? "No." (Yes.)', ["Is it so?", '"No."', "(Yes.)"]),
        ("ver. 2 of x.y is out... and more", ["ver.", "2 of x.y is out... and more"]),
        ("A heading\n\nand its text", ["A heading", "and its text"]),
        ("A line\nthat goes on. Done", ["A line\nthat goes on.", "Done"]),
        ("1. First item\n2. Second item", ["1. First item\n2. Second item"]),
        ("你好。再见!好吗?", ["你好。", "再见!好吗?"]),
    ],
)
def test_a_text_is_cut_where_a_reader_would(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


def test_other_languages_know_no_english_abbreviations() -> None:
    assert split_sentences("Es war der 3. Mai. No. Ja.", english=False) == [
        "Es war der 3. Mai.",
        "No.",
        "Ja.",
    ]


@given(st.text(alphabet="aB.!? \n\"'(1。", max_size=80))
def test_with_newlines_kept_the_sentences_are_the_text(text: str) -> None:
    assert "".join(split_sentences(text, keep_newlines=True)) == text


@pytest.mark.timeout(20)
@pytest.mark.parametrize("part", [".", "A. ", ".\n", " ", "\n ", "'.'", "。", "a.b"])
def test_an_endless_line_takes_linear_time(part: str) -> None:
    text = part * 100_000

    assert "".join(split_sentences(text, keep_newlines=True)) == text
