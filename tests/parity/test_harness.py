"""The real lm-evaluation-harness asks our model and gets what it gets from transformers' model."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from hf_folders import write_folder

from mds_train.cli import main
from mds_train.evaluate.wikitext import detokenize

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is installed in nox -s interop only")

LINES = [
    {"text": "The quick brown fox jumps over the lazy dog", "wrong": "cat"},
    {"text": "A model reads a text and says what may come next", "wrong": "last"},
    {"text": "Numbers such as these are made of several pieces", "wrong": "bytes"},
]
COMMON = """\
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
"""
TASKS = {
    "local_words": """\
output_type: loglikelihood
doc_to_text: "{{text.rsplit(' ', 1)[0]}}"
doc_to_target: "{{' ' + text.rsplit(' ', 1)[1]}}"
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "local_choices": """\
output_type: multiple_choice
doc_to_text: "{{text.rsplit(' ', 1)[0]}}"
doc_to_choice: "{{[text.rsplit(' ', 1)[1], wrong]}}"
doc_to_target: 0
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "local_rolling": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity}
  - {metric: byte_perplexity}
""",
    "local_answers": """\
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "t"
generation_kwargs: {until: ["e"], max_gen_toks: 8, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("harness")
    write_folder(place / "hf", family="llama", positions=24)
    (place / "data.jsonl").write_text("\n".join(json.dumps(line) for line in LINES))
    (place / "tasks").mkdir()
    for name, rest in TASKS.items():
        common = COMMON.format(data=place / "data.jsonl")
        (place / "tasks" / f"{name}.yaml").write_text(f"task: {name}\n{common}{rest}")
    return place


def test_its_results_are_those_of_transformers(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    output = place / "result.json"
    arguments = ["evaluate", "harness", str(place / "hf"), "--include", str(place / "tasks")]

    assert main([*arguments, "--tasks", ",".join(TASKS), "--output", str(output)]) == 0

    huggingface = importlib.import_module("lm_eval.models.huggingface")
    theirs = lm_eval.simple_evaluate(
        model=huggingface.HFLM(
            pretrained=str(place / "hf"), device="cpu", batch_size=2, dtype="float32"
        ),
        tasks=list(TASKS),
        task_manager=lm_eval.tasks.TaskManager(include_path=str(place / "tasks")),
        bootstrap_iters=0,
    )["results"]
    ours = json.loads(output.read_text())["results"]
    for task, metrics in theirs.items():
        for name, value in metrics.items():
            if isinstance(value, float) and "stderr" not in name:
                assert ours[task][name] == pytest.approx(value, rel=1e-3), (task, name)


def test_an_unknown_task_is_one_sentence(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "harness", str(place / "hf"), "--tasks", "no_such_task"]) == 3

    assert "lm-eval knows no task no_such_task" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        " = = = Head = = = \n 1 @,@ 000 @.@ 5 @-@ x , a ; b : c ! d ? e . f ( g ) [ h ] { i } \n",
        "the boys ' \" quoted text \" and ' single ' it 's N or 5 ° C . ! ? : end",
        " a . ! b , , c s ' d",
    ],
)
def test_wikitext_is_cleaned_as_the_harness_does(text: str) -> None:
    theirs = importlib.import_module("lm_eval.tasks.wikitext.preprocess_wikitext")

    assert detokenize(text) == theirs.wikitext_detokenizer({"page": text})
