"""Nothing that a checkpoint file says is ever run; every attack ends in one clear sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import corpus
import pytest

from mds_ckpt.pickles.archive import open_torch_file
from mds_ckpt.scan import scan_path

if sys.platform == "win32":
    pytest.skip("FIFOs and resource limits are POSIX", allow_module_level=True)

# A file may look harmless to one door (a NaN weight, a pickle that scan only lists).
MAY_OPEN = {("scan", None)}


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attacks")
    (folder / "files").mkdir()
    attacks = corpus.pickles(folder / "MARK") | corpus.bombs()
    for name, data in attacks.items():
        (folder / "files" / name).write_bytes(data)
    for name, path in corpus.special_files(folder / "special").items():
        path.rename(folder / "files" / name)
    return folder


@pytest.fixture(scope="module")
def report(ground: Path) -> list[Mapping[str, Any]]:
    target = ground / "report.jsonl"
    script = Path(__file__).with_name("watched.py")
    run = subprocess.run(
        [sys.executable, str(script), str(ground), str(target)],
        capture_output=True,
        text=True,
        timeout=120,
        env={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in target.read_text().splitlines()]


def test_no_attack_runs_anything(report: list[Mapping[str, Any]], ground: Path) -> None:
    assert [entry for entry in report if entry["seen"]] == []
    assert not (ground / "MARK").exists()


def test_no_attack_crashes(report: list[Mapping[str, Any]]) -> None:
    assert [entry for entry in report if entry["outcome"] == "crashed"] == []


def test_every_door_but_scan_rejects_every_attack(report: list[Mapping[str, Any]]) -> None:
    opened = [
        (entry["attack"], entry["door"])
        for entry in report
        if entry["outcome"] == "opened" and entry["door"] != "scan"
    ]

    assert opened == []


def test_no_attack_takes_longer_than_five_seconds(report: list[Mapping[str, Any]]) -> None:
    assert [entry for entry in report if entry["seconds"] > 5] == []


def test_no_attack_grows_memory_by_256_mb(report: list[Mapping[str, Any]]) -> None:
    assert [entry for entry in report if entry["grown_mb"] > 256] == []


def test_a_rejection_names_the_file_and_says_what_to_do(report: list[Mapping[str, Any]]) -> None:
    for entry in report:
        if entry["outcome"] == "rejected":
            assert entry["attack"] in entry["detail"] or entry["door"] in entry["detail"]
            assert "; " in entry["detail"]
            assert "\n" not in entry["detail"]


@pytest.mark.parametrize(
    "name", sorted(name for name in corpus.pickles(Path("MARK")) if name[:3] not in {"P12"})
)
def test_scan_reports_every_hostile_pickle(ground: Path, name: str) -> None:
    verdicts = {finding.verdict for finding in scan_path(ground / "files" / name)}

    assert verdicts & {"dangerous", "broken"}


def test_weights_of_nan_are_opened_because_they_are_only_numbers(tmp_path: Path) -> None:
    path = tmp_path / "nan.pt"
    path.write_bytes(corpus.weights_of_nan())

    file = open_torch_file(path)

    assert file.read(file.value["w"]).shape == (4,)
