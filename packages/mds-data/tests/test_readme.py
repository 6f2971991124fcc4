"""The README's examples run as they stand, one after the other in one folder."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    if not README.is_file():
        pytest.skip("the README is not beside the tests")
    return BLOCK.findall(README.read_text(encoding="utf-8"))


def run(arguments: list[str], *, folder: Path) -> str:
    done = subprocess.run(
        arguments, check=False, cwd=folder, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.timeout(120)
def test_the_examples_run(tmp_path: Path) -> None:
    kinds = [kind for kind, _ in blocks()]
    printed = []

    for kind, code in blocks():
        if kind == "python":
            printed.append(run([sys.executable, "-c", code], folder=tmp_path))
            continue
        for line in code.splitlines():
            program, *arguments = shlex.split(line.removeprefix("$ "))
            assert program == "mds-data"
            printed.append(run([sys.executable, "-m", "mds_data", *arguments], folder=tmp_path))

    assert kinds == ["console", "python", "python", "console", "python", "console", "python"]
    assert "is sound" in printed[3]
    assert "most frequent tokens" in printed[4]
    assert "documents" in printed[5]
    assert "24" in printed[6]
