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
        command += ["--workers", "1", "--task", f"{number}/2", "--output", "out/clean.jsonl"]
        assert main(command) == 0

    parts = [Path(f"out/clean.task-{number}-of-2.jsonl") for number in (1, 2)]
    lines = [line for part in parts for line in part.read_text().splitlines()]
    assert len(lines) == sum(range(7))


def filter_files(command: list[str], *options: str) -> int:
    shared = ["--input", "*.jsonl", "--on-error", "skip", "--workers", "1"]
    return main([*command, *shared, *options])


@pytest.mark.parametrize(
    "command",
    [
        ["clean", "--min-words", "30"],
        ["decontaminate", "--against", "2.jsonl", "--words", "9"],
        ["redact", "--kinds", "EMAIL", "PHONE"],
    ],
)
def test_joined_parts_of_a_filter_are_the_bytes_of_one_run(command: list[str]) -> None:
    assert filter_files(command, "--output", "out/all.jsonl") == 0
    for number in (1, 2, 3):
        task = ["--task", f"{number}/3", "--report", "out/why.json"]
        assert filter_files(command, "--output", "out/part.jsonl", *task) == 0

    parts = [Path(f"out/part.task-{number}-of-3.jsonl").read_bytes() for number in (1, 2, 3)]
    assert b"".join(parts) == Path("out/all.jsonl").read_bytes()
    assert len(list(Path("out").glob("why.task-*-of-3.json"))) == 3


@pytest.mark.parametrize("mode", ["near", "exact"])
def test_signatures_of_tasks_remove_the_copies_of_one_run(mode: str) -> None:
    Path("7.jsonl").write_bytes(Path("6.jsonl").read_bytes() + Path("2.jsonl").read_bytes())
    command = ["dedup", "--mode", mode, "--threshold", "0.7"]
    files = ["--report", "out/why.json", "--removed", "out/removed.jsonl"]
    assert filter_files(command, "--output", "out/unique.jsonl", *files) == 0
    for number in (2, 1, 3):
        assert filter_files(command, "--output", "again.jsonl", "--task", f"{number}/3") == 0
    parts = sorted(map(str, Path().glob("again.task-*.signatures")), reverse=True)
    files = [each.replace("out/", "two/") for each in files]

    assert (
        filter_files(command, "--output", "two/unique.jsonl", *files, "--signatures", *parts) == 0
    )

    assert contents("two") == contents("out")
    assert len(Path("out/removed.jsonl").read_text().splitlines()) >= 8


def test_signatures_that_do_not_fit_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2):
        assert filter_files(["dedup"], "--output", "u.jsonl", "--task", f"{number}/2") == 0
    one, two = (f"u.task-{number}-of-2.signatures" for number in (1, 2))

    def refused(*options: str) -> str:
        capsys.readouterr()
        assert filter_files(["dedup"], "--output", "out/u.jsonl", *options) == 3
        assert not Path("out/u.jsonl").exists()
        return capsys.readouterr().err

    assert "task 2 is missing" in refused("--signatures", one)
    assert "other settings" in refused("--threshold", "0.5", "--signatures", one, two)
    assert "holds no signatures" in refused("--signatures", one, ".")
    places = Path(two, "places")
    kept = places.read_bytes()
    places.write_bytes(kept[:-1])
    assert "was cut or changed" in refused("--signatures", one, two)
    places.write_bytes(kept)
    Path("6.jsonl").write_text(Path("6.jsonl").read_text().replace("a", "b"))
    assert "was changed" in refused("--signatures", one, two)
    Path("6.jsonl").unlink()
    assert "other files" in refused("--signatures", one, two)
    assert filter_files(["dedup"], "--output", "u.jsonl", "--task", "1/2", "--removed", "r") == 2


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
