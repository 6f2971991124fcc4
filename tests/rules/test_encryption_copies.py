"""mds-data and mds-ckpt don't import each other, so both carry the code of the encrypted folder."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGES = Path(__file__).parents[2] / "packages"
ONE, OTHER = (
    PACKAGES / f"mds-{name}" / "src" / f"mds_{name}" / "encryption" for name in ("data", "ckpt")
)


def modules(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.py")}


def test_the_two_copies_are_the_same_byte_for_byte() -> None:
    assert modules(ONE).keys() >= {"envelope.py", "keys.py", "segments.py"}
    assert modules(ONE) == modules(OTHER)


def test_they_name_no_package_of_ours() -> None:
    for name, code in modules(ONE).items():
        for node in ast.walk(ast.parse(code)):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                named.append(node.module or "")
            assert not [each for each in named if each.startswith("mds_")], name
