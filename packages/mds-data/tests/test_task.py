"""A job array's tasks share the files, and their stores become the store of one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_material import small_tokenizer, text, write_jsonl

from mds_data import open_store
from mds_data.cli import main
from mds_data.preprocess.inputs import InputError, InputFile
from mds_data.preprocess.task import Task, parse_task, task_files
from mds_data.store.verify import verify_store


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    Path("tokenizer.json").write_bytes(small_tokenizer())
    for part in range(7):
        rows = [{"text": text(n, words=30 * part + 5), "lang": f"l{part % 3}"} for n in range(part)]
        lines = [json.dumps(row) + "\n" for row in rows]
        Path(f"{part}.jsonl").write_text("".join([*lines, "{broken\n" * (part % 2)]))
    return tmp_path


def preprocess(output: str, *options: str) -> int:
    command = ["preprocess", "--input", "*.jsonl", "--tokenizer", "tokenizer.json", "--append-eod"]
    command += ["--on-error", "skip", "--split", "9,1,0", "--columns", "lang", "--workers", "1"]
    return main([*command, "--split-sentences", "--output", output, *options])


def contents(store: str) -> dict[str, bytes]:
    return {
        path.relative_to(store).as_posix(): path.read_bytes()
        for path in Path(store).rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("count", [1, 3, 7])
def test_rewritten_tasks_are_the_bytes_of_one_run(count: int) -> None:
    assert preprocess("whole") == 0
    for number in reversed(range(1, count + 1)):
        assert preprocess("part", "--task", f"{number}/{count}") == 0
    parts = sorted(map(str, Path().glob("part.task-*")), reverse=True)

    assert main(["merge", *parts, "--rewrite", "--output", "joined"]) == 0
    assert main(["merge", *parts, "--output", "linked"]) == 0

    assert len(parts) == count
    assert contents("joined") == contents("whole")
    linked, whole = open_store("linked"), open_store("whole")
    assert [document.tolist() for document in linked] == [d.tolist() for d in whole]
    assert linked.column("lang").tolist() == whole.column("lang").tolist()
    assert all(verify_store(store).sound for store in (*parts, "joined", "linked"))


def test_a_missing_task_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 3):
        preprocess("part", "--task", f"{number}/3")

    assert main(["merge", "part.task-1-of-3", "part.task-3-of-3", "--output", "joined"]) == 3
    assert "task 2 is missing" in capsys.readouterr().err
    assert main(["merge", *["part.task-1-of-3"] * 2, "--rewrite", "--output", "joined"]) == 3
    preprocess("whole")
    assert main(["merge", "part.task-1-of-3", "whole", "--output", "joined"]) == 3
    assert "others are not" in capsys.readouterr().err


def test_a_task_that_was_killed_can_be_started_again_blindly() -> None:
    for _ in range(2):
        assert preprocess("part", "--task", "2/3", "--resume") == 0
    assert preprocess("part", "--task", "2/3") == 3


def test_stores_that_no_job_array_wrote_can_be_rewritten_too() -> None:
    for name in ("one", "two"):
        preprocess(name)
    main(["merge", "one", "two", "--output", "linked"])

    assert main(["merge", "linked", "one", "--rewrite", "--output", "joined"]) == 0

    joined, one = open_store("joined"), open_store("one")
    assert len(joined) == 3 * len(one)
    assert joined.manifest.segments == ()
    assert joined.doc_sentences.tolist() == one.doc_sentences.tolist() * 3
    assert verify_store("joined").sound


def test_clean_works_on_the_files_of_a_task() -> None:
    for number in (1, 2):
        command = ["clean", "--input", "*.jsonl", "--min-words", "1", "--on-error", "skip"]
        command += ["--workers", "1", "--task", f"{number}/2", "--output", f"{number}.clean"]
        assert main(command) == 0

    lines = [line for n in (1, 2) for line in Path(f"{n}.clean").read_text().splitlines()]
    assert len(lines) == sum(range(7))


@pytest.mark.parametrize("task", ["3", "0/2", "3/2", "1/0", "-1/2", "a/b"])
def test_a_misspelt_task_is_wrong_usage(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert preprocess("part", f"--task={task}") == 2
    assert "task" in capsys.readouterr().err


def test_more_tasks_than_files_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert preprocess("part", "--task", "1/8") == 3
    assert "start at most 7 tasks" in capsys.readouterr().err


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.data())
def test_every_file_belongs_to_one_task_and_no_task_is_empty(
    sizes: list[int], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    files = [
        InputFile(path=Path(str(n)), format="jsonl", compression=None, size=size)
        for n, size in enumerate(sizes)
    ]

    parts = [task_files(files, Task(number, count)) for number in range(1, count + 1)]

    assert [file for part in parts for file in part] == files
    assert all(parts)
    largest = max(sum(file.size + 1 for file in part) for part in parts)
    assert largest <= (sum(sizes) + len(sizes)) / count + 2 * (max(sizes) + 1)


def test_names_of_tasks_sort_as_the_tasks_do() -> None:
    names = [parse_task(f"{number}/12").suffix() for number in range(1, 13)]

    assert names == sorted(names)
    assert names[2] == ".task-03-of-12"
    with pytest.raises(InputError, match="at most 1 tasks"):
        task_files(
            [InputFile(path=Path("a"), format="jsonl", compression=None, size=1)], Task(1, 2)
        )


def test_an_address_belongs_to_ray(capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(Path("a.jsonl"), ["a"])

    assert preprocess("store", "--address", "auto") == 2
    assert "--engine ray" in capsys.readouterr().err
