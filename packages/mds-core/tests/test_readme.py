"""The README's examples run as they stand."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
FENCE = re.compile(r"^```(python|console)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = FENCE.findall(README.read_text(encoding="utf-8"))
SCRIPTS = [text for language, text in BLOCKS if language == "python"]
SESSIONS = [text for language, text in BLOCKS if language == "console"]


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", [s for s in SCRIPTS if not s.startswith("# ")])
def test_examples_in_python_run(script: str, tmp_path: Path) -> None:
    example = tmp_path / "example.py"
    example.write_text(script)

    runpy.run_path(str(example))


@pytest.mark.parametrize("session", SESSIONS)
def test_examples_at_the_prompt_print_what_they_show(session: str, tmp_path: Path) -> None:
    for script in SCRIPTS:
        if named := re.match(r"# (\w+\.py)\n", script):
            (tmp_path / named[1]).write_text(script)
    command, _, expected = session.removeprefix("$ ").partition("\n")
    program, *arguments = command.split()

    printed = run([sys.executable, "-m", MODULES[program], *arguments], tmp_path)

    assert printed.strip() == expected.strip()


MODULES = {"torchrun": "torch.distributed.run"}
"""Programs of the prompt, as modules of this Python."""


def test_there_are_three_examples() -> None:
    assert len(SCRIPTS) == 3
    assert len(SESSIONS) == 1
