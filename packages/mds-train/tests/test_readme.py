"""Runs the README from top to bottom in an empty folder."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

import mds_data.cli
import mds_train.cli

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"^```(python|console|toml)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
PROGRAMS = {"mds-train": mds_train.cli.main, "mds-data": mds_data.cli.main}


def run_console(text: str, *, capsys: pytest.CaptureFixture[str]) -> None:
    """Run each ``$ command``; the lines below it must be in what it prints."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, *shown = part.splitlines()
        program, *arguments = shlex.split(command)
        code = PROGRAMS[program](arguments)
        printed = capsys.readouterr()
        assert code == 0, f"{command}\n{printed.err}"
        output = re.sub(" +", " ", printed.out)  # columns are as wide as the paths here
        for line in shown:
            assert re.sub(" +", " ", line) in output, (
                f"{command} did not print: {line}\n{printed.out}"
            )


def test_the_examples_of_the_readme_do_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(README.read_text(encoding="utf-8"))
    assert [language for language, _ in blocks].count("console") >= 3

    for language, text in blocks:
        if language == "python":
            script = tmp_path / "example.py"
            script.write_text(text)
            runpy.run_path(str(script))
        elif language == "toml":
            name = text.splitlines()[0].removeprefix("# ")
            (tmp_path / name).write_text(text)
        else:
            run_console(text, capsys=capsys)

    assert (tmp_path / "run" / "curves.png").is_file()
