"""The README's examples run as they stand."""

import shlex
from pathlib import Path

import pytest

from mds_kernels.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language):
    return [part.split("```")[0] for part in README.split(f"```{language}\n")[1:]]


@pytest.mark.parametrize("program", blocks("python"))
def test_python_blocks_run(program):
    exec(compile(program, "README.md", "exec"), {})  # noqa: S102 - our own README


@pytest.mark.parametrize(
    "command",
    [line[2:] for block in blocks("console") for line in block.splitlines() if line[:2] == "$ "],
)
def test_console_blocks_succeed(command, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    program, *arguments = shlex.split(command)
    if program == "pip":
        return

    assert program == "mds-kernels"
    assert main(arguments) == 0


def test_there_are_three_examples():
    assert len(blocks("python")) == 2
    assert len(blocks("console")) == 2  # installation, and verify with doctor
