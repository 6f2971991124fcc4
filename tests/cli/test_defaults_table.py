"""The documentation's table of defaults that differ from Megatron's is the one that is used."""

from __future__ import annotations

from pathlib import Path

from mds_train.config.fields import field_table
from mds_train.config.loading import toml_value
from mds_train.config.schema import TrainConfig
from mds_train.migration.megatron_defaults import DIFFERENT_DEFAULTS

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "from-megatron.md"


def test_the_page_lists_every_default_that_differs() -> None:
    section = PAGE.read_text(encoding="utf-8").split("\n## Defaults that differ\n")[1]
    rows = [line for line in section.splitlines() if line.startswith("| ")]

    expected = []
    for item in DIFFERENT_DEFAULTS:
        ours = field_table(TrainConfig)[item.key].default
        flags = ", ".join(f"`{flag}`" for flag in item.flags) or "none"
        shown = "not set" if ours is None else f"`{toml_value(ours)}`"
        expected.append(f"| {flags} | {item.theirs} | `{item.key}` | {shown} | {item.why} |")
    assert rows[1:] == expected
