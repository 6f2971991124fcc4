"""MLCommons' own validator accepts the description of a store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mds_data.cli import main

mlcroissant = pytest.importorskip("mlcroissant", reason="runs in nox -s interop")


@pytest.mark.parametrize("licence", ["CC-BY-4.0", "MIT OR Apache-2.0", None])
def test_a_store_is_described_so_that_the_validator_accepts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, licence: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(f"{name}.jsonl").write_text(json.dumps({"text": "1 2 3"}) + "\n")
        command = ["preprocess", "--input", f"{name}.jsonl", "--output", name, "--workers", "1"]
        command += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
        facts = ["--licence", licence, "--terms", "<b>&\"'"] if licence else []
        assert main([*command, *facts]) == 0
    assert main(["merge", "a", "b", "--output", "whole"]) == 0

    assert main(["inspect", "whole", "--croissant", "whole.json"]) == 0

    dataset = mlcroissant.Dataset(jsonld="whole.json")
    assert dataset.metadata.ctx.issues.errors == set()
    assert dataset.metadata.ctx.conforms_to.value.endswith("/1.1")
    assert len(dataset.metadata.distribution) > 1
