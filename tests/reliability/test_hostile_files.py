"""Hostile files given to every command as whatever it reads: one sentence, nothing is run.

A few hundred of the meetings always; all with the environment variable MDS_RELIABILITY=full.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doors import furnish
from hostile_texts import hostile_texts
from promises import write_step

from mds_data import write_store

TESTS_OF_CKPT = Path(__file__).parents[2] / "packages" / "mds-ckpt" / "tests"
sys.path[:0] = [str(TESTS_OF_CKPT), str(TESTS_OF_CKPT / "attacks")]

import corpus  # noqa: E402
import hostile_folders  # noqa: E402
import safetensors_attacks  # noqa: E402

FULL = os.environ.get("MDS_RELIABILITY") == "full"
EVERY = 1 if FULL else 47

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(sys.platform == "win32", reason="FIFOs and resource limits are POSIX"),
]


def attacks(folder: Path) -> list[Path]:
    """Every hostile file and folder, made in ``folder``."""
    folder.mkdir()
    for name, data in {**corpus.pickles(folder.parent / "MARK"), **corpus.bombs()}.items():
        (folder / name).write_bytes(data)
    for number, (_, build) in enumerate(safetensors_attacks.REFUSED.values()):
        (folder / f"header-{number:02}.safetensors").write_bytes(build())
    special = corpus.special_files(folder.parent / "special")
    folders = hostile_folders.hostile_folders(folder.parent / "folders", folder.parent / "MARK")
    texts = hostile_texts(folder.parent / "texts", folder.parent / "MARK")
    return sorted([*folder.iterdir(), *special.values(), *folders.values(), *texts])


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doors")
    documents = [np.arange(40) % 64 for _ in range(5)]
    write_store(folder / "store", documents, vocab_size=64, eod_id=0)
    paths = attacks(folder / "attacks")
    write_step(folder, 3)
    (folder / "step-3").rename(folder / "good")
    furnish(folder)
    assert len(paths) >= 133
    (folder / "paths.json").write_text(json.dumps([str(path) for path in paths]))
    return folder


@pytest.fixture(scope="module")
def report(ground: Path) -> list[Mapping[str, Any]]:
    script = Path(__file__).with_name("open_doors.py")
    run = subprocess.run(
        [sys.executable, str(script), str(ground), str(ground / "report.jsonl"), str(EVERY)],
        capture_output=True,
        text=True,
        timeout=1400,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in (ground / "report.jsonl").read_text().splitlines()]


def is_refusal(line: Mapping[str, Any]) -> bool:
    """A sentence and a code; or, of those that interpret nothing or report, no error of ours."""
    finding = line["door"].endswith((" verify", " --policy"))
    allowed = (0, 1, 2, 3) if line["lax"] or finding else (2, 3)
    told = line["said"].strip() or line["code"] in (0, 1)
    return line["code"] in allowed and told and "Traceback" not in line["said"]


def test_nothing_that_a_file_says_is_run(report: list[Mapping[str, Any]], ground: Path) -> None:
    assert report
    assert not (ground / "MARK").exists()


def test_every_command_refuses_every_file_in_one_sentence(report: list[Mapping[str, Any]]) -> None:
    wrong = [line for line in report if not is_refusal(line)]

    assert wrong == []


def test_no_file_takes_time_or_memory(report: list[Mapping[str, Any]]) -> None:
    assert [line for line in report if line["cpu_seconds"] > 5 or line["grown_mb"] > 256] == []
