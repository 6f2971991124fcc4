"""The README's examples run as they stand, in a folder with a checkpoint."""

from __future__ import annotations

import importlib
import pkgutil
import shlex
from pathlib import Path

import ckpt_samples as samples
import pytest

import mds_ckpt
from mds_ckpt.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return [part.split("```")[0] for part in README.split(f"```{language}\n")[1:]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model = samples.model("llama")
    samples.save(tmp_path / "checkpoints", model, samples.arrays(model), step=200)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_run_one_after_the_other(here: Path) -> None:
    lines = [line for block in blocks("console") for line in block.splitlines()]
    commands = [line[2:] for line in lines if line.startswith("$ ")]
    ours = [shlex.split(command)[1:] for command in commands if command.startswith("mds-ckpt ")]

    assert len(ours) >= 5
    for arguments in ours:
        assert main(arguments) == 0, arguments
    assert (here / "model" / "config.json").exists()


def test_the_program_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = blocks("python")

    exec(compile(program, "README.md", "exec"), {})  # noqa: S102

    assert capsys.readouterr().out.startswith("mds 200 2\n(37, 16) F32\n")


def test_public_names_are_what_they_say_whatever_was_imported_before() -> None:
    """No module stands in the place of a function of its name."""
    for module in pkgutil.iter_modules(mds_ckpt.__path__):
        if module.name != "__main__":
            importlib.import_module(f"mds_ckpt.{module.name}")
    for name in mds_ckpt.__all__:
        assert callable(getattr(mds_ckpt, name)), name
