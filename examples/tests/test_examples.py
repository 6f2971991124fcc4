"""Each example trains for two steps on made-up tokens; `nox -s examples` runs this."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from mds_data import write_store
from mds_train import cli

EXAMPLES = sorted(path for path in Path(__file__).parents[1].glob("*.toml") if path.stem != "base")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "store"
    numbers = random.Random(0)
    documents = [[numbers.randrange(8192) for _ in range(2000)] for _ in range(40)]
    write_store(path, documents, vocab_size=8192, split="90,10,0")
    return path


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains(example: Path, store: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    paths = ["--data.store", str(store), "--train.run-dir", str(run_dir)]
    short = ["--train.exit-step", "2", "--watch.eval-interval", "2", "--watch.eval-samples", "8"]

    assert cli.main(["run", str(example), *paths, *short]) == 0

    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] in ("train", "validation")]
    assert len(losses) == 3
    assert all(8 < loss < 10 for loss in losses), "about ln 8192 = 9.01 before anything is learned"
