"""The command line: exit codes, sentences instead of tracebacks, old flags, what is printed."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from text_material import WORDS, golden, small_tokenizer, text, write_jsonl

from mds_data import open_store
from mds_data.cli import build_parser, main
from mds_data.commands.output import bar, printable
from mds_data.commands.progress import ProgressLine, timespan
from mds_data.store.commit import FileOperations


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("tokenizer.json").write_bytes(small_tokenizer())
    write_jsonl(Path("in.jsonl"), [text(n) for n in range(20)])
    return tmp_path


def preprocess(*arguments: str, tokenizer: tuple[str, ...] = ("--tokenizer", "tokenizer.json")):
    workers = () if "--workers" in arguments else ("--workers", "1")
    command = ["preprocess", *tokenizer, "--append-eod", *workers, *arguments]
    return main(command if "--input" in arguments else [*command, "--input", "in.jsonl"])


def names(path: Path) -> set[str]:
    return {each.name for each in path.iterdir()}


def test_help_loads_no_library_that_encodes_or_reads_arrays() -> None:
    code = (
        "import sys; from mds_data.cli import main; main(['--help']); "
        "print({'zarr', 'tokenizers', 'sentencepiece', 'torch'} & set(sys.modules))"
    )

    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert done.stdout.splitlines()[-1] == "set()"
    assert "mds-data sample-corpus --output corpus.jsonl" in done.stdout


@pytest.mark.parametrize("command", sorted(build_parser()._subparsers._group_actions[0].choices))
def test_every_command_teaches_by_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0

    shown = capsys.readouterr().out
    assert f"mds-data {command}" in shown.split("example", 1)[1]
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["no-such-command"],
        ["preprocess", "--input", "in.jsonl"],
        ["preprocess", "--input", "in.jsonl", "--output", "s"],
        ["preprocess", "--inp", "in.jsonl", "--output", "s", "--tokenizer", "tokenizer.json"],
        ["train-tokenizer", "--input", "in.jsonl", "--vocab-size", "300", "--output", "t.model"],
    ],
)
def test_wrong_usage_is_exit_code_2(folder: Path, arguments: list[str]) -> None:
    before = names(folder)

    assert main(arguments) == 2

    assert names(folder) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0"], "workers (0) must be at least 1"),
        (["--split", "a,b"], "split 'a,b' must be numbers"),
        (["--tokenizer-type", "GPT2BPETokenizer"], "needs --vocab-file"),
        (["--vocab-extra-ids", "3"], "--vocab-extra-ids works with"),
        (["--json-keys", "a/b", "text"], "the key 'a/b' can't be part"),
    ],
)
def test_arguments_that_do_not_go_together_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    before = names(folder)

    assert preprocess("--output", "store", *arguments) == 2

    assert message in capsys.readouterr().err
    assert names(folder) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "nowhere.jsonl"], "nowhere.jsonl: no such input file"),
        (["--input", "*.gz"], "*.gz: no file matches"),
        (["--input", "."], "is a folder"),
        (["--input", "empty.jsonl"], "no document is left"),
        (["--input", "broken.jsonl"], "broken.jsonl, line 1: not JSON"),
        (["--tokenizer", "nowhere.json"], "nowhere.json: no such tokenizer file"),
        (["--tokenizer", "in.jsonl"], "in.jsonl is not a JSON tokenizer file"),
        (["--eod-token", "<none>"], "no token '<none>'"),
    ],
)
def test_rejected_input_is_one_sentence_exit_code_3_and_nothing_left(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    Path("empty.jsonl").write_text("")
    Path("broken.jsonl").write_text("hello\n")
    before = names(folder)

    assert preprocess("--output", "store", *arguments) == 3

    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert error.startswith("mds-data preprocess: ")
    assert names(folder) == before


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "your quota is used up"),
        (errno.EROFS, "this disk can only be read"),
        (errno.EIO, "the disk failed"),
        (errno.EACCES, "no permission"),
    ],
)
def test_a_full_disk_is_exit_code_4_and_nothing_left(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    message: str,
) -> None:
    def write(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(FileOperations, "write", write)
    before = names(folder)

    assert preprocess("--output", "store") == 4

    assert f"store: {message}" in capsys.readouterr().err
    assert names(folder) == before


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere"
)
def test_no_permission_is_exit_code_4(folder: Path) -> None:
    locked = folder / "locked"
    locked.mkdir(mode=0o500)

    assert preprocess("--output", "locked/store") == 4


def test_debug_shows_where_an_error_came_from(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        preprocess("--input", "nowhere.jsonl", "--output", "store", "--debug")


def test_the_old_flags_make_the_old_names_and_warn_when_they_do_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = ["--dataset-impl", "mmap", "--chunk-size", "25", "--lang", "english", "--seq-length", "9"]

    assert preprocess("--output-prefix", "my-gpt2", "--log-interval", "5", *old) == 0

    warnings = [line for line in capsys.readouterr().err.splitlines() if "changes nothing" in line]
    assert [line.split()[1] for line in warnings] == [
        "--dataset-impl",
        "--chunk-size",
        "--seq-length",
        "--lang",
    ]
    assert len(open_store("my-gpt2_text_document")) == 20


def test_megatrons_tokenizer_flags_give_the_tokens_of_the_original(folder: Path) -> None:
    data = golden("fixtures") / "datasets"
    files = ["--vocab-file", str(data / "gpt2bpe-vocab.json")]
    files += ["--merge-file", str(data / "gpt2bpe-merges.txt")]

    code = preprocess(
        *("--input", str(data / "pydoc.jsonl"), "--output-prefix", "pydoc", "--workers", "2"),
        tokenizer=("--tokenizer-type", "GPT2BPETokenizer", *files),
    )

    assert code == 0
    store = open_store("pydoc_text_document")
    stream = b"".join(document.tobytes() for document in store)
    assert stream == (data / "pydoc_text_document.bin").read_bytes()


def test_several_keys_make_a_store_each(folder: Path) -> None:
    Path("two.jsonl").write_text('{"q": "the store", "a": "a copy"}\n')

    assert preprocess("--input", "two.jsonl", "--json-keys", "q", "a", "--output", "s") == 0

    assert len(open_store("s_q")) == len(open_store("s_a")) == 1
    assert not Path("s").exists()


def test_the_null_tokenizer_takes_numbers(folder: Path) -> None:
    Path("ids.txt").write_text("1 2 3\n\n4 5\n")
    null = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "10")

    code = preprocess(
        "--input", "ids.txt", "--text-unit", "paragraph", "--output", "s", tokenizer=null
    )

    assert code == 0
    assert [document.tolist() for document in open_store("s")] == [[1, 2, 3, 10], [4, 5, 10]]


def test_skipped_lines_are_counted_and_written_to_the_report(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in.jsonl").write_text('{"text": "the"}\nnot json\n{"text": ""}\n{"text": "store"}\n')

    assert preprocess("--output", "s", "--on-error", "skip", "--report", "problems.jsonl") == 0

    error = capsys.readouterr().err
    assert "skipped 1 not JSON or not UTF-8: in.jsonl line 2" in error
    assert "skipped 1 empty: in.jsonl line 3" in error
    assert "2 documents" in error
    problems = [json.loads(line) for line in Path("problems.jsonl").read_text().splitlines()]
    assert [(p["file"], p["line"], p["kind"]) for p in problems] == [
        ("in.jsonl", 2, "broken"),
        ("in.jsonl", 3, "empty"),
    ]


def test_train_tokenizer_writes_the_file_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "train-tokenizer",
        "--input",
        "in.jsonl",
        "--vocab-size",
        "280",
        "--output",
        "t.json",
    ]

    assert main(command) == 0
    assert main(command) == 3
    assert "t.json exists" in capsys.readouterr().err
    assert main([*command, "--overwrite", "--vocab-size", "9000"]) == 3
    assert "too small for a vocabulary of 9000" in capsys.readouterr().err
    assert names(folder) == {"tokenizer.json", "in.jsonl", "t.json"}


@pytest.mark.parametrize("model", ["bpe", "wordpiece", "unigram"])
@pytest.mark.parametrize("content", ["", "\n \n", '{"text": " "}\n'])
def test_a_corpus_without_text_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], model: str, content: str
) -> None:
    Path("empty.jsonl").write_text(content)
    output = "t.model" if model == "unigram" else "t.json"
    options = ["--vocab-size", "300", "--model", model, "--output", output]

    assert main(["train-tokenizer", "--input", "empty.jsonl", *options]) == 3

    error = capsys.readouterr().err
    assert error.startswith("mds-data train-tokenizer: empty.jsonl: there is no text in it; ")
    assert names(folder) == {"tokenizer.json", "in.jsonl", "empty.jsonl"}


def test_inspect_shows_counts_lengths_and_decoded_text(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preprocess("--output", "store", "--split", "90,10,0")
    capsys.readouterr()

    assert main(["inspect", "store"]) == 0

    shown = capsys.readouterr().out
    assert "documents   20" in shown
    assert "train 90 % (18 documents), valid 10 % (2 documents)" in shown
    assert "'<|endoftext|>'" in shown
    assert "document 0 (" in shown
    assert text(0)[:40] in shown
    assert "█" in shown


def test_inspect_gives_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preprocess("--output", "store")
    capsys.readouterr()

    assert main(["inspect", "store", "--json", "--samples", "1"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["documents"] == 20
    assert found["manifest"]["format"] == "mds-store"
    assert found["samples"][0]["text"].startswith(WORDS[0])


def test_inspect_without_a_usable_tokenizer_shows_ids(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preprocess("--output", "store")
    Path("store/tokenizer.json").write_bytes(b"x" * Path("store/tokenizer.json").stat().st_size)
    capsys.readouterr()

    assert main(["inspect", "store"]) == 0

    shown = capsys.readouterr().out
    assert "can't be used" in shown
    ids = " ".join(map(str, open_store("store")[0][:5]))
    assert ids in shown


def test_verify_tells_a_sound_store_from_a_flipped_bit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preprocess("--output", "store")

    assert main(["verify", "store"]) == 0
    assert "store is sound" in capsys.readouterr().out
    shard = Path("store/tokens/c/0")
    data = bytearray(shard.read_bytes())
    data[10] ^= 1
    shard.write_bytes(data)

    assert main(["verify", "store"]) == 1
    assert "store/tokens/c/0" in capsys.readouterr().out
    assert main(["verify", "nowhere"]) == 3


def test_the_commands_on_stores_do_what_they_say(folder: Path) -> None:
    preprocess("--output", "a", "--split", "90,10,0")
    preprocess("--output", "b")

    codes = [
        main(["merge", "a", "b", "--output", "both"]),
        main(["split", "a", "--output", "parts"]),
        main(["export", "a", "--output-prefix", "pair"]),
        main(["import", "pair", "--output", "c", "--eod-id", "0", "--vocab-size", "300"]),
        main(["repack", "a", "--layout", "archive", "--output", "d"]),
        main(["erase", "c", "--documents", "3", "5-7", "--reason", "asked for"]),
    ]

    assert codes == [0] * 6
    assert len(open_store("both")) == 40
    assert names(Path("parts")) == {"train", "valid"}
    assert len(open_store("parts/train")) == 18
    assert open_store("d")[4].tolist() == open_store("a")[4].tolist()
    assert [i for i, length in enumerate(open_store("c").doc_length) if not length] == [3, 5, 6, 7]


def test_erasing_from_a_merged_store_names_the_other_holder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preprocess("--output", "a")
    main(["merge", "a", "--output", "whole"])

    code = main(["erase", "a", "--documents", "0", "--reason", "asked for"])

    assert code == 1
    assert "whole" in capsys.readouterr().out
    assert main(["erase", "a", "--documents", "99", "--reason", "x"]) == 3
    assert main(["erase", "a", "--documents", "x", "--reason", "x"]) == 2


def test_an_old_pair_is_repaired(folder: Path) -> None:
    pair = str(golden("fixtures") / "datasets" / "pydoc_text_document")

    assert main(["repair", pair, "--output", "mended"]) == 0

    store = open_store("mended")
    assert len(store) == 79
    assert all(document[-1] == store.eod_id for document in store)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def ticks(step: float):
    now = [0.0]

    def clock() -> float:
        now[0] += step
        return now[0]

    return clock


def test_progress_on_a_terminal_moves_one_line() -> None:
    stream = Terminal()
    progress = ProgressLine(stream, label="preprocess", clock=ticks(2.0))

    progress.update(25_000_000, 100_000_000, detail="12 documents")
    progress.finish("done")

    assert stream.getvalue() == (
        "\rpreprocess:  25 %  25.0 of 100.0 MB  12.50 MB/s  12 documents  ETA 0:06"
        "\rpreprocess: done                                                       \n"
    )


def test_progress_in_a_log_is_a_line_now_and_then() -> None:
    stream = io.StringIO()
    progress = ProgressLine(stream, label="x", unit="files", clock=ticks(4.0))

    for done in range(1, 7):
        progress.update(done, 6)

    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert all(amount in line for amount, line in zip(["3 of 6", "6 of 6"], lines, strict=True))


def test_progress_in_a_log_can_count_items() -> None:
    stream = io.StringIO()
    progress = ProgressLine(stream, label="x", clock=ticks(0.0), every=10)

    for items in (5, 12, 19, 25):
        progress.update(items, 100, items=items)

    assert len(stream.getvalue().splitlines()) == 2


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0:00"), (65, "1:05"), (3600, "1:00:00"), (90061, "25:01:01")]
)
def test_a_timespan_is_short(seconds: float, shown: str) -> None:
    assert timespan(seconds) == shown


def test_text_from_a_store_cannot_steer_the_terminal() -> None:
    assert "\x1b" not in printable("a\x1b[2Jb\x07\u202e")
    assert printable("a b") == "a b"
    assert len(bar(0.5, width=10)) == len(bar(0.0, width=10)) == len(bar(1.0, width=10)) == 10
