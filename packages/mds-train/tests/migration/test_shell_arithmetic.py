from __future__ import annotations

import pytest

from mds_train.migration.shell_arithmetic import Unknown, arithmetic

VARIABLES = {"a": "7", "b": "-3", "empty": "", "text": "x1"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("300 * 1000000000 * 2 / 2048", 292968750),
        ("a / 2 - b", 6),
        ("-7 / 2", -3),  # towards zero, as C has it
        ("-7 % 3", -1),
        ("2 ** 3 ** 2", 512),
        ("1 << 4", 16),
        ("a > 5 ? 10 : 20", 10),
        ("a == 7 && b < 0", 1),
        ("!a || !1", 0),
        ("0x10 + empty", 16),
    ],
)
def test_values_are_bashs(text: str, value: int) -> None:
    assert arithmetic(text, value_of=lambda name: VARIABLES.get(name, "")) == value


@pytest.mark.parametrize(
    "text", ["1 / 0", "text + 1", "i = 3", "(1", "1 2", "2 ** 5000", "1.5 * 2"]
)
def test_what_is_no_whole_number_is_unknown(text: str) -> None:
    with pytest.raises(Unknown):
        arithmetic(text, value_of=lambda name: VARIABLES.get(name, ""))
