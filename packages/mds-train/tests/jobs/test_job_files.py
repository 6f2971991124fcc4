"""Job files are those that were reviewed, are sound shell and YAML, and hold no secret."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from mds_train.cli import main
from mds_train.errors import UsageError
from mds_train.jobs.command import LAUNCHERS
from mds_train.jobs.job import Job, Mount
from mds_train.jobs.yaml_text import to_yaml

GOLDEN = Path(__file__).with_name("golden")
OPTIONS = [
    *("launch", "configs/run.toml", "--nodes", "4", "--processes", "8"),
    *("--run-dir", "/data/my run", "--mount", "shared-disk:/data"),
    *("--secret", "WANDB_API_KEY", "--env", "NOTE=it's two words", "--parallel.tp-size", "8"),
]


def write(launcher: str, folder: Path) -> dict[str, str]:
    """The files of a job, by name."""
    assert main([*OPTIONS, "--launcher", launcher, "--output", str(folder)]) == 0
    return {path.name: path.read_text("utf-8") for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_files_are_the_reviewed_ones(launcher: str, tmp_path: Path) -> None:
    found = write(launcher, tmp_path / launcher)

    if os.environ.get("MDS_WRITE_GOLDEN"):
        shutil.rmtree(GOLDEN / launcher, ignore_errors=True)
        shutil.copytree(tmp_path / launcher, GOLDEN / launcher)
    golden = {path.name: path.read_text("utf-8") for path in sorted((GOLDEN / launcher).iterdir())}
    assert found == golden


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_scripts_are_sound_shell(launcher: str, tmp_path: Path) -> None:
    scripts = [name for name in write(launcher, tmp_path) if name.endswith((".sh", ".sbatch"))]

    for name in scripts:
        subprocess.run(["bash", "-n", name], cwd=tmp_path, check=True)
        if name.endswith(".sh"):
            assert os.access(tmp_path / name, os.X_OK)
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", name], cwd=tmp_path, check=True)


def test_the_words_reach_the_command_as_they_were_given(tmp_path: Path) -> None:
    script = write("local", tmp_path)["mds-train.sh"]
    stub = tmp_path / "bin" / "torchrun"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$NOTE" "$@"\n')
    stub.chmod(0o755)
    variables = {"PATH": f"{stub.parent}:{os.environ['PATH']}", "WANDB_API_KEY": "x"}

    done = subprocess.run(
        ["bash", "-c", script], env=variables, check=True, capture_output=True, text=True
    )

    note, *words = done.stdout.splitlines()
    assert note == "it's two words"
    expected = [
        *("run", "configs/run.toml", "--parallel.tp-size", "8", "--train.run-dir", "/data/my run"),
        *("--checkpoint.load", "/data/my run", "--checkpoint.from-scratch-if-missing"),
    ]
    assert words[-len(expected) :] == expected


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_secret_stands_in_no_file(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "very-secret-value")

    assert not [text for text in write(launcher, tmp_path).values() if "very-secret" in text]


def test_printing_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main([*OPTIONS, "--launcher", "slurm", "--print"]) == 0

    assert capsys.readouterr().out == (GOLDEN / "slurm" / "mds-train.sbatch").read_text("utf-8")
    assert list(tmp_path.iterdir()) == []


def test_another_job_of_that_name_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("slurm", tmp_path)

    assert main([*OPTIONS, "--launcher", "slurm", "--output", str(tmp_path)]) == 0
    again = [*OPTIONS, "--launcher", "slurm", "--output", str(tmp_path), "--nodes", "5"]
    assert main(again) == 3

    assert "another job" in capsys.readouterr().err
    assert "--nodes=4" in (tmp_path / "mds-train.sbatch").read_text("utf-8")


@pytest.mark.parametrize(
    "wrong",
    [{"name": "My Job"}, {"nodes": 0}, {"secrets": ("A B",)}, {"variables": {"1X": "y"}}],
)
def test_impossible_jobs_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Job(**({"name": "x", "config": "c.toml", "run_dir": "r"} | wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["disk", "disk:data", ":/data"])
def test_a_mount_names_source_and_path(text: str) -> None:
    with pytest.raises(UsageError, match="SOURCE:/path"):
        Mount.parse(text)


def test_yaml_reads_back_as_it_was() -> None:
    yaml = pytest.importorskip("yaml")
    data = {
        "words": ["yes", "no", "null", "1e3", "0755", "a: b", "#x", "- y", "", " z", "12:30:00"],
        "lines": "first\n  second\n\nlast\n",
        "nested": [{"a": [1, 2.5, None, True], "b": {}}, [], ["x", "one\ntwo\n"]],
        "text\twith": 'quotes " and \\ and ü',
    }

    assert yaml.safe_load(to_yaml(data)) == data
    assert json.loads(json.dumps(yaml.safe_load(to_yaml(data)))) == data
