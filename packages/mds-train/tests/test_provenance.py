"""A checkpoint names every dataset that its weights have seen, with sources and licences."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_cases import VOCABULARY, run_here, tiny_config

from mds_ckpt import convert, open_checkpoint
from mds_ckpt.cli import main
from mds_data import write_store
from mds_data.store.erase import erase_documents

pytestmark = pytest.mark.timeout(240)

COMMONS = {"path": "wiki.jsonl", "size": 7, "sha256": "0" * 64, "licence": "CC-BY-SA-4.0"}
LETTERS = {"path": "a/\x1b[31m<b>.txt", "size": 9, "sha256": "1" * 64, "licence": "CC-BY-NC-4.0"}


def make_store(path: Path, inputs: list[dict[str, object]]) -> Path:
    random = np.random.default_rng(7)
    documents = [random.integers(0, VOCABULARY, 40) for _ in range(40)]
    write_store(path, documents, vocab_size=VOCABULARY, eod_id=0, provenance={"inputs": inputs})
    return path


def sources(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["inspect", str(folder), "--sources", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_tuned_checkpoint_names_its_own_datasets_and_those_of_its_parent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make_store(tmp_path / "first", [{**COMMONS, "url": "https://e.org"}])
    erase_documents(first, [3], reason="asked for")
    manifest = (first / "manifest.json").read_bytes()
    second = make_store(tmp_path / "second", [dict(LETTERS)])
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    whole: dict[str, Any] = {"split": "50,50,0"}
    short: dict[str, Any] = {"train_steps": 3}
    run_here(
        tiny_config(
            tmp_path,
            data={"store": str(first), **whole},
            train={**short, "run_dir": str(base)},
        )
    )
    run_here(
        tiny_config(
            tmp_path,
            data={"store": str(second), **whole},
            train={**short, "run_dir": str(tuned)},
            checkpoint={"load": str(base), "load_weights_only": True},
        )
    )
    shutil.rmtree(first)
    shutil.rmtree(second)
    step = tuned / "checkpoints" / "step-3"

    found = sources(step, capsys)

    (own,), (earlier,) = found["datasets"], found["earlier_datasets"]
    assert own["sources"][0]["licence"] == "CC-BY-NC-4.0"
    assert earlier["sources"] == [
        {"source": "https://e.org", "licence": "CC-BY-SA-4.0", "files": 1, "bytes": 7}
    ]
    assert earlier["erased_documents"] == 1
    assert earlier["revision"] == 2
    assert earlier["manifest_sha256"] == hashlib.sha256(manifest).hexdigest()
    assert found["parent"]["uuid"] == sources(base / "checkpoints" / "step-3", capsys)["uuid"]
    assert found["packages"].keys() >= {"mds-train", "mds-kernels", "torch"}

    assert main(["inspect", str(step), "--sources"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "earlier training" in shown

    convert(step, tmp_path / "light", to="mds", weights_only=True)
    light = sources(tmp_path / "light", capsys)
    assert (light["datasets"], light["earlier_datasets"]) == ([own], [earlier])
    assert open_checkpoint(tmp_path / "light").manifest is not None
