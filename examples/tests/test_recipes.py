"""Each recipe, made tiny, trains for two steps; `nox -s examples` runs this."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from mds_data import write_store
from mds_train import cli
from mds_train.recipes.catalogue import all_recipes

RECIPES = [recipe.name for recipe in all_recipes()]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "store"
    numbers = random.Random(0)
    documents = [[numbers.randrange(256) for _ in range(300)] for _ in range(20)]
    write_store(path, documents, vocab_size=256, split="90,10,0")
    return path


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains(recipe: str, store: Path, tmp_path: Path) -> None:
    config, run_dir = tmp_path / "tiny.toml", tmp_path / "run"
    assert cli.main(["recipes", "export", recipe, "--tiny", "--output", str(config)]) == 0

    paths = ["--data.store", str(store), "--train.run-dir", str(run_dir)]
    assert cli.main(["run", str(config), *paths]) == 0

    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(losses) == 2
    assert all(abs(loss - math.log(256)) < 0.5 for loss in losses), "nothing is learned yet"
