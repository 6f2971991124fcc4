"""Names that a terminal would act on are escaped; the letters of any script stay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mds_ckpt.escape import printable


@given(st.text())
def test_the_result_is_always_printable_and_short(text: str) -> None:
    assert printable(text).isprintable()
    assert len(printable(text, longest=40)) <= 400


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("decoder.layers.0", "decoder.layers.0"),
        ("größe 層", "größe 層"),
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("a\nb\0", "a\\x0ab\\x00"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\ud800", "\\ud800"),
        ("\U000e0001", "\\U000e0001"),
    ],
)
def test_what_a_terminal_acts_on_is_escaped(text: str, expected: str) -> None:
    assert printable(text) == expected


def test_the_middle_of_a_long_name_is_left_out() -> None:
    assert printable("a" * 500 + "b" * 500, longest=20) == "aaaaaaaa...bbbbbbbb"
