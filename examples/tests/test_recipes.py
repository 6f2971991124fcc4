"""Each recipe, made tiny, trains for two steps; `nox -s examples` runs this."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from mds_data import StoreWriter, TokenizerFile, write_store
from mds_data.tokenizers.bert import load_bert_tokenizer
from mds_train import cli
from mds_train.recipes.catalogue import all_recipes

RECIPES = {
    recipe.name: setting.value if (setting := recipe.settings().get("model.family")) else "gpt"
    for recipe in all_recipes()
}
MARKS, SENTINELS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), 20


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of running text, and one of sentences, which BERT and T5 read."""
    folder = tmp_path_factory.mktemp("data")
    numbers = random.Random(0)
    documents = [[numbers.randrange(256) for _ in range(300)] for _ in range(20)]
    write_store(folder / "store", documents, vocab_size=256, split="90,10,0")
    tokenizer = TokenizerFile(kind="tokenizers-json", content=wordpiece(folder))
    with StoreWriter(
        folder / "sentences", vocab_size=256, sentences=True, tokenizer=tokenizer, split="90,10,0"
    ) as writer:
        for _ in range(20):
            lengths = [numbers.randrange(5, 20) for _ in range(9)]
            words = [numbers.randrange(len(MARKS), 200) for _ in range(sum(lengths))]
            writer.add(words, sentence_lengths=lengths)
        writer.commit()
    sentences = folder / "sentences"
    return {"gpt": folder / "store", "bert": sentences, "t5": sentences}


def wordpiece(folder: Path) -> bytes:
    """A tokenizer of 256 tokens; [BOS] and [EOS] are among them."""
    words = [f"w{number}" for number in range(256 - len(MARKS) - 2 - SENTINELS)]
    path = folder / "vocab.txt"
    path.write_text("\n".join([*MARKS, *words]) + "\n")
    tokenizer = load_bert_tokenizer(path, lower_case=True, extra_ids=SENTINELS)
    assert tokenizer.vocab_size == 256
    return tokenizer.file.content


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains(recipe: str, stores: dict[str, Path], tmp_path: Path) -> None:
    store = stores[RECIPES[recipe]]
    config, run_dir = tmp_path / "tiny.toml", tmp_path / "run"
    assert cli.main(["recipes", "export", recipe, "--tiny", "--output", str(config)]) == 0

    paths = ["--data.store", str(store), "--train.run-dir", str(run_dir)]
    assert cli.main(["run", str(config), *paths]) == 0

    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    guessing = math.log(256) + (math.log(2) if RECIPES[recipe] == "bert" else 0.0)
    assert len(losses) == 2
    assert all(abs(loss - guessing) < 0.5 for loss in losses), "nothing is learned yet"
