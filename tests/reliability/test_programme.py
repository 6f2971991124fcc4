"""Every row of the programme has its tests: none was renamed or removed without a word."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS: dict[str, list[str]] = tomllib.loads(
    Path(__file__).with_name("programme.toml").read_text(encoding="utf-8")
)


def test_no_row_is_missing() -> None:
    attacks, crashes = set("PDBSZIT"), {f"C{number}" for number in range(1, 14)}

    assert attacks | crashes <= set(ROWS)
    assert all(ROWS.values())


@pytest.mark.parametrize("row", ROWS)
def test_the_tests_of_a_row_exist(row: str) -> None:
    for name in ROWS[row]:
        file, _, function = name.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")

        assert re.search(rf"^def {function}\(", text, flags=re.MULTILINE), name
