"""Job files are those that were reviewed, are sound shell and YAML, and hold no secret."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tomllib
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


CONFIG = """\
# A tiny model.
[model]
num_layers = 2
"""


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command is given; the configuration lies below it."""
    home = tmp_path_factory.mktemp("home")
    (home / "configs").mkdir()
    (home / "configs" / "run.toml").write_text(CONFIG)
    monkeypatch.chdir(home)
    return home


def write(launcher: str, folder: Path) -> dict[str, str]:
    """The files of a job, by name; the home's path is written /home/me."""
    assert main([*OPTIONS, "--launcher", launcher, "--output", str(folder)]) == 0
    home = str(Path.cwd().resolve())
    return {
        path.name: path.read_text("utf-8").replace(home, "/home/me")
        for path in sorted(folder.iterdir())
    }


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_files_are_the_reviewed_ones(launcher: str, tmp_path: Path) -> None:
    found = write(launcher, tmp_path / launcher)

    if os.environ.get("MDS_WRITE_GOLDEN"):
        shutil.rmtree(GOLDEN / launcher, ignore_errors=True)
        (GOLDEN / launcher).mkdir(parents=True)
        for name, text in found.items():
            (GOLDEN / launcher / name).write_text(text, "utf-8")
            shutil.copymode(tmp_path / launcher / name, GOLDEN / launcher / name)
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


def test_the_words_reach_the_command_as_they_were_given(home: Path, tmp_path: Path) -> None:
    write("local", tmp_path)
    script = (tmp_path / "mds-train.sh").read_text("utf-8")
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
        *("run", str(home.resolve() / "configs" / "run.toml"), "--parallel.tp-size", "8"),
        *("--train.run-dir", "/data/my run"),
        *("--checkpoint.load", "/data/my run", "--checkpoint.from-scratch-if-missing"),
    ]
    assert words[-len(expected) :] == expected


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_secret_stands_in_no_file(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "very-secret-value")

    assert not [text for text in write(launcher, tmp_path).values() if "very-secret" in text]


def test_printing_writes_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*OPTIONS, "--launcher", "slurm", "--print"]) == 0

    printed = capsys.readouterr().out.replace(str(home.resolve()), "/home/me")
    assert printed == (GOLDEN / "slurm" / "mds-train.sbatch").read_text("utf-8")
    assert [path.name for path in home.iterdir()] == ["configs"]


CARRIERS = ("k8s", "azureml", "azure-vm")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_command_finds_its_configuration(launcher: str, tmp_path: Path) -> None:
    files = write(launcher, tmp_path)

    carried = [name for name, text in files.items() if "A tiny model." in text]
    assert bool(carried) == (launcher in CARRIERS)
    named = {
        "k8s": "run /etc/mds-train/run.toml",
        "azureml": "run ${{inputs.config}}",
        "azure-vm": "run /opt/mds-train/run.toml",
    }
    words = named.get(launcher, "run /home/me/configs/run.toml")
    assert any(words in text for text in files.values())


def test_a_configuration_is_carried_with_its_base(home: Path, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    (home / "configs" / "base.toml").write_text("[train]\ntrain_steps = 7\n")
    (home / "configs" / "run.toml").write_text('base = "base.toml"\n' + CONFIG)

    text = write("k8s", tmp_path)["mds-train.yaml"]

    carried = tomllib.loads(next(iter(yaml.safe_load_all(text)))["data"]["run.toml"])
    assert "base" not in carried
    assert (carried["train"]["train_steps"], carried["model"]["num_layers"]) == (7, 2)


@pytest.mark.parametrize("launcher", CARRIERS)
def test_a_run_that_would_be_lost_with_its_container_is_refused(
    launcher: str, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = [word if word != "/data/my run" else "/tmp/run" for word in OPTIONS]

    assert main([*elsewhere, "--launcher", launcher, "--print"]) == 2

    assert "is on no --mount" in capsys.readouterr().err


def test_a_path_that_only_the_job_sees_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    on_storage = [word if word != "configs/run.toml" else "/data/run.toml" for word in OPTIONS]
    nowhere = [word if word != "configs/run.toml" else "run.toml" for word in OPTIONS]

    assert main([*on_storage, "--launcher", "k8s", "--print"]) == 0
    assert "run /data/run.toml" in capsys.readouterr().out
    assert main([*nowhere, "--launcher", "k8s", "--print"]) == 3
    assert "no such file here" in capsys.readouterr().err


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
