"""Measured by workers, written whole, refused when the store is another."""

import math
import sys
from collections import Counter

import numpy as np
import pytest
from store_material import random_documents, write_small

from mds_data import GPTDataset, analyze, open_index, open_store
from mds_data.cli import main
from mds_data.difficulty.analysis import Documents
from mds_data.errors import DataError
from mds_data.store.append import StoreAppender

MEASURE = "def largest(ids):\n    return int(ids.max()) if len(ids) else 0\n\nwrong = 7\n"
WRONG = "def none(ids):\n    return None\n"


@pytest.fixture
def path(tmp_path):
    write_small(tmp_path / "s", random_documents(80), split="80,20,0")
    return tmp_path / "s"


@pytest.fixture
def own_measures(tmp_path, monkeypatch):
    (tmp_path / "measures_of_a_test.py").write_text(MEASURE + WRONG)
    monkeypatch.syspath_prepend(tmp_path)
    yield "measures_of_a_test"
    sys.modules.pop("measures_of_a_test", None)


def test_measures_are_those_of_a_plain_loop(path, own_measures):
    rows = Documents(open_store(path), "train")
    names = ["length", "vocabulary-rarity", "mean-rarity", f"{own_measures}:largest"]

    values = analyze(rows, names)

    documents = [document.tolist() for document in open_store(path)[:64]]
    counts = Counter(token for document in documents for token in document)
    total = sum(counts.values())
    rarity = [sum(-math.log(counts[t] / total) for t in document) for document in documents]
    assert values["length"].tolist() == [len(document) for document in documents]
    np.testing.assert_allclose(values["vocabulary-rarity"], rarity)
    mean = [r / max(len(d), 1) for r, d in zip(rarity, documents, strict=True)]
    np.testing.assert_allclose(values["mean-rarity"], mean)
    largest = [max(document, default=0) for document in documents]
    assert values[f"{own_measures}:largest"].tolist() == largest


def test_the_workers_do_not_show(path, monkeypatch):
    monkeypatch.setattr("mds_data.difficulty.analysis._STRETCH", 50)
    dataset = GPTDataset(open_store(path), seq_length=32)
    steps = []
    alone = analyze(
        dataset, ["vocabulary-rarity", "length"], on_progress=lambda *s: steps.append(s)
    )
    shared = analyze(dataset, ["vocabulary-rarity", "length"], workers=2)
    for name, values in alone.items():
        assert values.tobytes() == shared[name].tobytes()
        assert len(values) == len(dataset)
    assert steps[-1] == (2 * len(dataset), 2 * len(dataset))


def test_an_index_belongs_to_its_store_and_rows(path, tmp_path, capsys):
    output = tmp_path / "index"
    command = ["analyze", str(path), "--seq-length", "32", "--split", "train", "--workers", "1"]
    assert main([*command, "--output", str(output)]) == 0
    assert "vocabulary-rarity" in capsys.readouterr().out
    store = open_store(path)
    dataset = GPTDataset(store, seq_length=32, split="train")

    index = open_index(output)

    expected = analyze(dataset, ["vocabulary-rarity"])["vocabulary-rarity"]
    np.testing.assert_array_equal(index.values("vocabulary-rarity"), expected)
    index.check(store, seq_length=32, split="train", order="fast", seed=1234)
    with pytest.raises(DataError, match="with seq_length 32, not 64"):
        index.check(store, seq_length=64)
    with pytest.raises(KeyError, match="has no measure 'length'"):
        index.values("length")
    with StoreAppender(path) as appender:
        appender.add([1, 2, 3])
        appender.commit()
    with pytest.raises(DataError, match="another store or revision"):
        index.check(open_store(path), seq_length=32)


def test_a_changed_or_foreign_index_is_refused(path, tmp_path):
    output = tmp_path / "index"
    options = ["--output", str(output), "--unit", "document", "--metric", "length"]
    assert main(["analyze", str(path), *options, "--workers", "1"]) == 0
    file = output / "length.f64"
    file.write_bytes(file.read_bytes()[:-8] + b"\1" * 8)
    with pytest.raises(DataError, match="was cut or changed"):
        open_index(output).values("length")
    file.unlink()
    with pytest.raises(DataError, match="is missing"):
        open_index(output).values("length")
    with pytest.raises(DataError, match="is no difficulty index"):
        open_index(path)
    with pytest.raises(FileNotFoundError, match="no such difficulty index"):
        open_index(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        (["--metric", "longness", "--unit", "document"], 3, "'longness' is no measure"),
        (["--metric", "no.such:thing", "--unit", "document"], 3, "can't be imported"),
        (["--metric", "measures_of_a_test:wrong", "--unit", "document"], 3, "is no function"),
        (["--metric", "measures_of_a_test:none", "--unit", "document"], 3, "gave None for row 0"),
        ([], 2, "samples need --seq-length"),
        (["--unit", "document", "--seq-length", "4"], 2, "belongs to --unit sample"),
        (["--unit", "document", "--workers", "0"], 2, "workers (0) must be at least 1"),
    ],
)
def test_wrong_requests_are_one_sentence(
    path, tmp_path, own_measures, capsys, options, code, reason
):
    command = ["analyze", str(path), "--output", str(tmp_path / "index"), "--workers", "1"]
    assert main([*command, *options]) == code
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "index").exists()


def test_only_an_index_is_replaced(path, tmp_path, capsys):
    command = ["analyze", str(path), "--unit", "document", "--metric", "length", "--workers", "1"]
    output = ["--output", str(tmp_path / "index")]
    assert main([*command, *output]) == 0
    assert main([*command, *output]) == 3
    assert "exists. Choose another output" in capsys.readouterr().err
    assert main([*command, *output, "--overwrite"]) == 0
    assert main([*command, "--output", str(path), "--overwrite"]) == 3
    assert "is no difficulty index" in capsys.readouterr().err


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("count", [1, 3, 7])
def test_parts_of_a_job_array_are_joined_to_the_bytes_of_one_run(path, tmp_path, capsys, count):
    command = ["analyze", str(path), "--seq-length", "32", "--workers", "1"]
    command += ["--metric", "vocabulary-rarity", "length", "--output"]
    assert main([*command, str(tmp_path / "whole")]) == 0
    for number in reversed(range(1, count + 1)):
        assert main([*command, str(tmp_path / "part"), "--task", f"{number}/{count}"]) == 0
    parts = sorted(map(str, tmp_path.glob("part.task-*")), reverse=True)

    assert main(["merge", *parts, "--output", str(tmp_path / "joined")]) == 0

    assert contents(tmp_path / "joined") == contents(tmp_path / "whole")
    assert len(parts) == count
    with pytest.raises(DataError, match="join the parts of all by mds-data merge"):
        open_index(parts[0])


def test_parts_that_do_not_fit_are_refused(path, tmp_path, capsys):
    command = ["analyze", str(path), "--unit", "document", "--workers", "1", "--metric", "length"]
    for number in (1, 3):
        assert main([*command, "--output", str(tmp_path / "a"), "--task", f"{number}/3"]) == 0
    assert main([*command, "--output", str(tmp_path / "whole")]) == 0
    other = [*command, "--split", "train", "--output", str(tmp_path / "b"), "--task", "2/3"]
    assert main(other) == 0
    one, three = (str(tmp_path / f"a.task-{number}-of-3") for number in (1, 3))

    def refused(*parts):
        capsys.readouterr()
        assert main(["merge", *parts, "--output", str(tmp_path / "joined")]) == 3
        assert not (tmp_path / "joined").exists()
        return capsys.readouterr().err

    assert "task 2 is missing" in refused(one, three)
    assert "stands there twice" in refused(one, three, str(tmp_path / "b.task-2-of-3"), one)
    assert "is a whole index" in refused(one, str(tmp_path / "whole"), three)
    assert "measured other rows" in refused(one, str(tmp_path / "b.task-2-of-3"), three)
    assert main(["merge", one, "--rewrite", "--output", str(tmp_path / "joined")]) == 2
