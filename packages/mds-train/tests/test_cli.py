"""The commands from outside, on a run of a few steps that all tests of this file share."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mds_ckpt.encryption.keys import new_identity
from mds_ckpt.protection.encrypt import encrypt_checkpoint
from mds_data import TokenizerFile, write_store
from mds_train import cli, session
from mds_train.generate import load_model
from mds_train.watch import read_metrics

TINY = """\
[model]
num_layers = 2
hidden_size = 32
num_attention_heads = 2
vocab_size = 128
max_position_embeddings = 32
[data]
store = "store"
seq_length = 16
[train]
run_dir = "run"
train_steps = 4
global_batch_size = 4
micro_batch_size = 2
[optimizer]
lr = 1e-2
[watch]
eval_interval = 2
eval_samples = 4
log_interval = 1
"""


def tokenizer() -> bytes:
    """A tokenizer of single bytes, small enough to be made here."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    vocabulary = {"<|endoftext|>": 0} | {chr(code): code for code in range(1, 128)}
    made = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    made.add_special_tokens(["<|endoftext|>"])
    return made.to_str().encode()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    numbers = random.Random(0)
    documents = [[numbers.randrange(97, 123) for _ in range(200)] + [0] for _ in range(20)]
    write_store(
        folder / "store",
        documents,
        vocab_size=128,
        eod_id=0,
        split="80,20,0",
        tokenizer=TokenizerFile(kind="HFTokenizer", content=tokenizer()),
    )
    (folder / "tiny.toml").write_text(TINY)
    return folder


def printed_by(*arguments: str, folder: Path) -> str:
    """Run a command in this process, so that torch is imported once for all of them."""
    text = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(text):
        assert cli.main(arguments) == 0, text.getvalue()
    return text.getvalue()


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    """A run of two of four steps, resumed to its end."""
    first = printed_by("run", "tiny.toml", "--train.exit-step", "2", folder=place)
    assert "step 2/4 | loss" in first
    second = printed_by("resume", "run", folder=place)
    assert "Resuming at step 2" in second
    assert "Done at step 4" in second
    return place / "run"


def test_a_run_and_its_resumption_leave_everything_a_person_looks_for(run: Path) -> None:
    history = read_metrics(run / "metrics.jsonl")

    assert [entry["step"] for entry in history.train] == [1, 2, 3, 4]
    assert [entry["step"] for entry in history.validation] == [2, 4]
    assert history.resume_steps == (2,)
    assert (run / "curves.png").stat().st_size > 10_000
    assert (run / "checkpoints/step-4/manifest.json").is_file()
    assert list((run / "tensorboard/steps").iterdir())
    assert "Saved" in (run / "logs/rank-0.log").read_text()
    assert "exit_step = 2" not in (run / "config.toml").read_text()


def test_the_trained_model_continues_a_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(run), "--prompt", "abc", "--prompt", "z", "--json"]
    arguments += ["--max-new-tokens", "5", "--temperature", "0"]

    assert cli.main(arguments) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert [answer["prompt"] for answer in answers] == ["abc", "z"]
    assert all(len(answer["tokens"]) <= 5 for answer in answers)


@pytest.fixture(scope="module")
def sealed(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's last checkpoint, encrypted in ``sealed`` for the identity in ``key.txt``."""
    folder = tmp_path_factory.mktemp("sealed")
    recipient = new_identity(folder / "key.txt")
    encrypt_checkpoint(run / "checkpoints/step-4", folder / "sealed", recipients=[recipient])
    return folder


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--prompt", "abc", "--greedy", "--json", "--max-new-tokens", "6"],
        ["evaluate", "perplexity", "--data", "words.txt"],
    ],
    ids=["generate", "evaluate"],
)
def test_an_encrypted_model_says_what_the_plain_one_says(
    command: list[str], run: Path, sealed: Path
) -> None:
    (sealed / "words.txt").write_text("abc def ghij " * 5)
    before = {path: path.stat().st_mtime_ns for path in sealed.rglob("*")}

    plain = printed_by(*command, str(run), folder=sealed)
    opened = printed_by(*command, "sealed", "--identity", "key.txt", folder=sealed)

    assert opened == plain
    assert {path: path.stat().st_mtime_ns for path in sealed.rglob("*")} == before


@pytest.mark.parametrize(
    ("key", "message"),
    [([], "no key was given"), (["--identity", "other.txt"], "does not open with the key")],
)
def test_without_the_right_key_one_sentence_says_so(
    key: list[str], message: str, sealed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not (sealed / "other.txt").exists():
        new_identity(sealed / "other.txt")

    with contextlib.chdir(sealed):
        assert cli.main(["generate", "sealed", "--prompt", "a", *key]) == 3

    output = capsys.readouterr()
    assert message in output.err
    assert (output.out, output.err.count("\n")) == ("", 1)


def test_prompts_of_a_file_are_answered_into_a_file(run: Path, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("abc\nz\n")
    arguments = ["generate", str(run), "--prompts", str(prompts), "--output", str(output)]
    arguments += ["--samples", "2", "--logprobs", "3", "--max-new-tokens", "4", "--batch-size", "3"]

    assert cli.main(arguments) == 0

    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [answer["prompt"] for answer in answers] == ["abc", "abc", "z", "z"]
    assert answers[0]["tokens"] != answers[1]["tokens"]
    for answer in answers:
        assert len(answer["logprobs"]) == len(answer["tokens"])
        assert all(len(likeliest) == 3 for likeliest in answer["top_logprobs"])


def test_an_answer_ends_before_a_stop_string(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(run), "--prompt", "abc", "--max-new-tokens", "8", "--greedy"]
    assert cli.main([*arguments, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)["text"]
    stop = whole[2:4]

    assert cli.main([*arguments, "--stop", stop]) == 0

    assert capsys.readouterr().out == "abc" + whole[: whole.index(stop)] + "\n"


def test_a_bad_line_of_prompts_leaves_no_half_written_answers(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    arguments = ["generate", str(run), "--prompts", str(prompts), "--output"]

    assert cli.main([*arguments, str(tmp_path / "out.txt"), "--max-new-tokens", "2"]) == 3

    assert 'line 2: there is no text "prompt"' in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [prompts]


def test_a_run_its_checkpoints_and_the_newest_of_them_are_the_same_model(run: Path) -> None:
    paths = (run, run / "checkpoints", run / "checkpoints/step-4")

    first, *others = (load_model(path).state_dict() for path in paths)

    for other in others:
        assert all(torch.equal(other[name], tensor) for name, tensor in first.items())


def test_a_tokenizer_that_is_missing_or_no_tokenizer_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    for path, words in ((tmp_path / "gone.json", "no such tokenizer"), (wrong, "not a tokenizer")):
        arguments = ["generate", str(run), "--prompt", "a", "--tokenizer", str(path)]

        assert cli.main(arguments) == 3

        assert words in capsys.readouterr().err


def test_a_second_run_in_the_same_folder_is_refused(
    run: Path, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)

    assert cli.main(["run", "tiny.toml"]) == 3

    message = capsys.readouterr().err
    assert "has checkpoints already (the newest is step-4)" in message
    assert f"mds-train resume {run}" in message


def test_help_needs_no_torch(place: Path) -> None:
    code = (
        "import sys, mds_train.cli as cli; cli.main(['--help']);"
        "print({'torch', 'deepspeed', 'matplotlib', 'tyro'} & set(sys.modules), file=sys.stderr)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )

    assert done.stderr.strip() == "set()"
    assert "resume" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "nowhere.toml"], 3, "nowhere.toml: there is no such configuration file"),
        (["run", "wrong.toml"], 3, 'table [model]: unknown key "num_layer"; did you mean'),
        (["run", "tiny.toml", "--data.store", "gone"], 3, "gone: there is no such token store"),
        (["run", "tiny.toml", "--parallel.tp-sise", "2"], 2, "did you mean --parallel.tp-size?"),
        (["run", "tiny.toml", "--fp8-hybrid"], 2, "is not taken over"),
        (["run", "tiny.toml", "--hysteresis", "0"], 3, "fp16.hysteresis is 0"),
        (["run"], 2, "CONFIG.toml is missing"),
        (["resume", "nowhere"], 3, "nowhere: there is no such run"),
        (["resume", "."], 3, "no config.toml"),
        (["generate", "nowhere", "--prompt", "x"], 3, "nowhere: there is no such checkpoint"),
        (["generate", "."], 2, "--prompt"),
        (["generate", "store", "--prompt", "x", "--colour"], 2, "Unknown argument '--colour'"),
        (["no-such-command"], 2, "no-such-command"),
        (["doctor", "now"], 2, "Unknown argument 'now'"),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_sentence_and_an_exit_code(
    arguments: list[str],
    code: int,
    words: str,
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    (place / "wrong.toml").write_text("[model]\nnum_layer = 2\n")

    assert cli.main(arguments) == code

    message = capsys.readouterr().err
    assert words in message
    assert "Traceback" not in message


def test_what_all_ranks_find_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("MASTER_PORT", "1")

    assert cli.main(["run", "nowhere.toml"]) == 3

    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "step-2"), "step-2: the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "run"), "run: permission denied"),
    ],
)
def test_a_full_disk_and_a_closed_folder_are_the_environments_fault(
    error: OSError,
    words: str,
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.chdir(place)
    monkeypatch.setattr(session, "perform", fail)
    arguments = ["run", "tiny.toml", "--train.run-dir", "other"]

    assert cli.main(arguments) == 4
    short = capsys.readouterr().err
    assert cli.main([*arguments, "--debug"]) == 4
    long = capsys.readouterr().err

    assert short == f"error: {words}" + short[len(f"error: {words}") :]
    assert len(short.splitlines()) == 1
    assert "Traceback" in long


def test_a_dry_run_says_how_large_it_would_be_and_writes_nothing(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)

    assert cli.main(["run", "tiny.toml", "--dry-run", "--train.run-dir", "dry"]) == 0

    text = capsys.readouterr().out
    assert "30,528 in" in text or "parameters" in text
    assert "memory of a rank" in text
    assert not (place / "dry").exists()


def test_the_printed_configuration_names_origins(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("MDS_TRAIN__SEED", "9")

    assert cli.main(["run", "tiny.toml", "--print-config", "--deepspeed", "--zero-stage", "2"]) == 0

    printed = capsys.readouterr()
    lines = {line.split(" = ")[0]: line for line in printed.out.splitlines()}
    assert lines["seed"].endswith("# environment MDS_TRAIN__SEED")
    assert lines["zero_stage"].endswith("# command line --zero-stage")
    assert lines["num_layers"].endswith("# tiny.toml")
    assert lines["beta2"].endswith("# default")
    assert "--deepspeed does nothing here" in printed.err


def test_the_help_of_a_command_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--help"]) == 0

    text = capsys.readouterr().out
    assert "--dry-run" in text
    assert "--optimizer.lr" in text


def test_the_whole_parser_lists_commands_and_settings() -> None:
    parser = cli.build_parser()

    text = parser.format_help()
    assert all(command in text for command in ("run", "resume", "generate", "doctor"))
    options = parser.parse_args(["run", "x.toml", "--parallel.tp-size", "2"])
    assert vars(options)["parallel.tp_size"] == "2"


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pipe that its reader closes")
def test_a_reader_that_has_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "mds_train", "doctor"]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writing)

    assert (done.returncode, done.stderr) == (0, b"")
