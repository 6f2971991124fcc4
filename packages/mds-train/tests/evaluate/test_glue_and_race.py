from __future__ import annotations

import json
import math
import random
from pathlib import Path
from statistics import fmean

import pytest

from mds_train.errors import InputError
from mds_train.evaluate.glue import TASKS, Sentences, judge, read_glue
from mds_train.evaluate.race import Question, read_race

FILES = {
    "CoLA": ("gj04\t1\t\tThey left.\n", Sentences("They left.", None, 1.0)),
    "SST-2": ("sentence\tlabel\nfine film \t1\n", Sentences("fine film", None, 1.0)),
    "MRPC": (
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n0\t7\t8\tOne "a\t"Two\r\n',
        Sentences('One "a', '"Two', 0.0),
    ),
    "STS-B": (
        "index\tgenre\tsentence1\tsentence2\tscore\n0\tx\tOne\tTwo\t3.250\n",
        Sentences("One", "Two", 3.25),
    ),
    "QQP": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\tA?\tB?\t1\n9\t9\n",
        Sentences("A?", "B?", 1.0),
    ),
    "MNLI": (
        "index\tsentence1\tsentence2\tlabel1\tgold_label\n0\tOne\tTwo\tneutral\tentailment\n",
        Sentences("One", "Two", 1.0),
    ),
    "QNLI": (
        "index\tquestion\tsentence\tlabel\n0\tA?\tB\tnot_entailment\n",
        Sentences("A?", "B", 1),
    ),
    "RTE": ("index\tsentence1\tsentence2\tlabel\n0\tA\tB\tentailment\n", Sentences("A", "B", 0)),
}


@pytest.mark.parametrize("name", TASKS)
def test_each_task_is_read_from_its_published_form(name: str, tmp_path: Path) -> None:
    content, expected = FILES[name]
    (tmp_path / "train.tsv").write_text(content, encoding="utf-8")

    assert read_glue(tmp_path / "train.tsv", TASKS[name]) == [expected]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"index\tsentence\nx\ty\n", "names no column question, label"),
        (b"index\tquestion\tsentence\tlabel\n0\tA\tB\tmaybe\n", "line 2: the label is 'maybe'"),
        (b"index\tquestion\tsentence\tlabel\n", "there is no sample"),
        (b"\xff\xff", "not a text in UTF-8"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "train.tsv").write_bytes(content)

    with pytest.raises(InputError, match=message):
        read_glue(tmp_path / "train.tsv", TASKS["QNLI"])


def test_metrics_are_their_definitions() -> None:
    draw = random.Random(3)
    ours = [float(draw.random() < 0.4) for _ in range(50)]
    theirs = [float(draw.random() < 0.6) for _ in range(50)]
    pairs = list(zip(ours, theirs, strict=True))
    tp, tn = pairs.count((1.0, 1.0)), pairs.count((0.0, 0.0))
    fp, fn = pairs.count((1.0, 0.0)), pairs.count((0.0, 1.0))

    found = judge(("accuracy", "f1", "matthews"), ours, theirs)

    assert found["accuracy"] == (tp + tn) / 50
    assert found["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn))
    below = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert found["matthews"] == pytest.approx((tp * tn - fp * fn) / below)


def test_correlations_are_their_definitions() -> None:
    draw = random.Random(4)
    ours = [round(draw.random() * 5, 1) for _ in range(30)]  # rounded, so that some are equal
    theirs = [round(draw.random() * 5, 1) for _ in range(30)]

    def correlation(a: list[float], b: list[float]) -> float:
        a, b = [x - fmean(a) for x in a], [x - fmean(b) for x in b]
        top = sum(x * y for x, y in zip(a, b, strict=True))
        return top / math.sqrt(sum(x * x for x in a) * sum(x * x for x in b))

    def ranks(values: list[float]) -> list[float]:
        return [
            sum(other < value for other in values) + (values.count(value) + 1) / 2
            for value in values
        ]

    found = judge(("pearson", "spearman"), ours, theirs)

    assert found["pearson"] == pytest.approx(correlation(ours, theirs))
    assert found["spearman"] == pytest.approx(correlation(ranks(ours), ranks(theirs)))
    assert judge(("pearson", "f1"), [1.0, 1.0], [0.0, 0.0]) == {"pearson": 0.0, "f1": 0.0}


ARTICLE = {
    "article": "A fox\n ran.",
    "questions": ["The fox _ .", "Who ran?"],
    "options": [["sat", "ran", "ate", "slept"], ["a", "b", "the fox", "d"]],
    "answers": ["B", "C"],
    "id": "high1.txt",
}


def test_questions_stand_with_each_answer(tmp_path: Path) -> None:
    (tmp_path / "high").mkdir()
    (tmp_path / "high" / "1.txt").write_text(json.dumps(ARTICLE))

    first, second = read_race([tmp_path])

    assert first == Question(
        "A fox ran.", ("The fox sat .", "The fox ran .", "The fox ate .", "The fox slept ."), 1
    )
    assert second.statements[2] == "Who ran? the fox"
    assert second.right == 2


@pytest.mark.parametrize(
    "change",
    [{"answers": ["E", "C"]}, {"options": [["a"], ["b"]]}, {"article": 3}, {"questions": ["x"]}],
)
def test_articles_of_another_form_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    (tmp_path / "1.txt").write_text(json.dumps(ARTICLE | change))

    with pytest.raises(InputError, match="line 1: not an article of RACE"):
        read_race([tmp_path])


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no question"):
        read_race([tmp_path])
