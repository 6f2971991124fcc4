"""`preprocess --redact` makes the store of the redacted text, and shows a value nowhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_material import byte_tokenizer, text

from mds_data import open_store
from mds_data.cli import main
from mds_data.preprocess import batches, long_record, pipeline, source
from mds_data.privacy.documents import DocumentRedactor
from mds_data.privacy.rules import RedactionRules
from mds_data.store.columns import column_labels

VALUES = ["bob@example.org", "203.0.113.77", "4111 1111 1111 1111", "DE89 3704 0044 0532 0130 00"]
KEY = b"0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.setattr(source, "_BATCH_BYTES", 2000)
    Path("raw").mkdir()
    Path("raw/tokenizer.json").write_bytes(byte_tokenizer())
    Path("raw/key").write_bytes(KEY)
    Path("raw/key").chmod(0o600)
    for part in range(3):
        with Path(f"raw/{part}.jsonl").open("w") as file:
            for n in range(part, 24, 3):
                value = VALUES[n // 2 % 4] if n % 2 else "nothing"
                record = {"text": f"{text(n)} {value}. {text(n + 1)}", "by": value, "score": n}
                file.write(json.dumps(record) + "\n")
            file.write(json.dumps({"text": "fine", "by": "x", "score": "bob@example.org"}) + "\n")
            file.write(json.dumps({"bob@example.org": 1, "by": "x", "score": 1}) + "\n")
    return tmp_path


def preprocess(output: str, *options: str, inputs: str = "raw/*.jsonl") -> int:
    command = ["preprocess", "--input", inputs, "--tokenizer", "raw/tokenizer.json"]
    command += ["--append-eod", "--on-error", "skip", "--columns", "by", "score:float"]
    return main([*command, "--workers", "1", "--output", output, *options])


def contents(store: str) -> dict[str, bytes]:
    return {
        path.relative_to(store).as_posix(): path.read_bytes()
        for path in Path(store).rglob("*")
        if path.is_file()
    }


def documents(store: str) -> list[list[int]]:
    with open_store(store) as opened:
        return [document.tolist() for document in opened]


@pytest.mark.parametrize("mode", ["placeholder", "mask", "pseudonym", "drop"])
def test_the_store_is_that_of_the_redacted_text(mode: str) -> None:
    key = ["--key-file", "raw/key"] if mode == "pseudonym" else []
    key_too = ["--redact-key-file", "raw/key"] if mode == "pseudonym" else []
    clean = ["redact", "--input", "raw/*.jsonl", "--output", "clean.jsonl", "--mode", mode]
    assert main([*clean, *key, "--json-keys", "text", "by"]) == 0

    assert preprocess("whole", "--redact", mode, *key_too) == 0
    assert preprocess("two-steps", inputs="clean.jsonl") == 0

    assert documents("whole") == documents("two-steps")
    with open_store("whole") as one, open_store("two-steps") as two:
        assert set(column_labels(one, "by").values()) == set(column_labels(two, "by").values())


@pytest.mark.parametrize("workers", ["1", "2"])
def test_no_file_and_no_message_shows_a_value(
    workers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--redact", "--workers", workers, "--report", "out/problems.jsonl"]

    assert preprocess("out/store", *options) == 0

    shown = capsys.readouterr()
    written = [path.read_bytes() for path in Path("out").rglob("*") if path.is_file()]
    with open_store("out/store") as store:
        written += [bytes(store[n][:-1].astype("u1")) for n in range(len(store))]
        labels = set(column_labels(store, "by").values())
    for value in VALUES:
        assert not any(value.encode() in each for each in written), value
        assert value not in shown.out + shown.err
    assert "<EMAIL>" in labels
    assert "redacted 12 documents: " in shown.err


def test_the_bytes_do_not_depend_on_workers_tasks_or_interruptions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert preprocess("whole", "--redact") == 0
    assert preprocess("shared", "--redact", "--workers", "2") == 0
    for number in (1, 2, 3):
        assert preprocess("part", "--redact", "--task", f"{number}/3") == 0
    parts = [f"part.task-{number}-of-3" for number in (1, 2, 3)]
    assert main(["merge", *parts, "--rewrite", "--output", "joined"]) == 0
    with monkeypatch.context() as patch:
        keep = pipeline.StoreWriter.checkpoint

        def checkpoint(self: Any, state: Any) -> None:
            keep(self, state)
            raise KeyboardInterrupt

        patch.setattr(pipeline.StoreWriter, "checkpoint", checkpoint)
        assert preprocess("resumed", "--redact", "--checkpoint-mb", "1") == 130
    assert preprocess("resumed", "--redact", "--resume") == 0

    assert contents("shared") == contents("joined") == contents("resumed") == contents("whole")
    transform = json.loads(Path("whole/manifest.json").read_bytes())["provenance"]["transforms"][0]
    assert transform["redaction"]["documents_changed"] == 12
    assert sum(transform["redaction"]["replaced"].values()) == 12


def test_another_key_is_another_run_and_stays_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert preprocess("one", "--redact", "pseudonym", "--redact-key-file", "raw/key") == 0
    one = json.loads(Path("one/manifest.json").read_bytes())["provenance"]["transforms"][0]
    Path("raw/key").write_bytes(KEY[::-1])
    options = ["--redact", "pseudonym", "--redact-key-file", "raw/key", "--resume"]

    assert preprocess("one", *options) == 3

    assert "exists" in capsys.readouterr().err
    assert not any(KEY in each for each in contents("one").values())
    assert len(one["arguments"]["redact"]["key"]) == 16


def test_options_that_do_not_go_together_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert preprocess("store", "--redact-kinds", "EMAIL") == 2
    assert "need --redact" in capsys.readouterr().err
    assert preprocess("store", "--redact", "pseudonym") == 3
    assert "openssl rand" in capsys.readouterr().err
    assert not Path("store").exists()


def test_what_may_stay_stays() -> None:
    Path("raw/allow").write_text("*@example.org\n")
    options = ["--redact", "--redact-allow", "raw/allow", "--redact-keep-kinds", "IP"]

    assert preprocess("store", *options) == 0

    with open_store("store") as store:
        joined = b"".join(bytes(store[n][:-1].astype("u1")) for n in range(len(store)))
    assert b"bob@example.org" in joined
    assert b"203.0.113.77" in joined
    assert b"<CARD>" in joined


def test_a_huge_record_is_redacted_as_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert preprocess("small", "--redact") == 0
    monkeypatch.setattr(long_record, "_PIECE", 64)
    monkeypatch.setattr(long_record, "_LONG_STRING", 32)
    monkeypatch.setattr(batches, "LONG_RECORD", 1)
    monkeypatch.setattr(source, "_BATCH_RECORDS", 1)

    assert preprocess("huge", "--redact") == 0

    assert contents("huge") == contents("small")


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from([*VALUES, "4111 1111", "@", "x.org", "lorem " * 5000]), max_size=12),
    st.data(),
)
def test_pieces_are_redacted_and_counted_as_the_whole(
    words: list[str], data: st.DataObject
) -> None:
    whole = " ".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    rules = RedactionRules(mode="drop")
    one, other = DocumentRedactor(rules), DocumentRedactor(rules)

    assert "".join(other.pieces(parts)) == one.texts([whole])[0]
    assert other.take_tally() == one.take_tally()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_pairs_and_conversations_are_redacted_too(
    workers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [{"source": f"to {value}", "target": f"an {value}"} for value in VALUES]
    chats = [
        {"messages": [{"role": r, "content": f"{r} {value}"} for r in ("user", "assistant")]}
        for value in VALUES
    ]
    for name, records in (("pairs", pairs), ("chats", chats)):
        lines = [json.dumps(record) + "\n" for record in [*records, {VALUES[0]: 1}]]
        Path(f"raw/{name}.jsonl").write_text("".join(lines))
    shared = ["--tokenizer", "raw/tokenizer.json", "--workers", workers, "--on-error", "skip"]
    shared += ["--redact", "--report"]
    nmt = ["preprocess-nmt", "--input", "raw/pairs.jsonl", *shared, "out/1", "--output", "out/nmt"]
    sft = ["preprocess-sft", "--input", "raw/chats.jsonl", *shared, "out/2", "--output", "out/sft"]

    assert main(nmt) == main([*sft, "--chat-template", "plain"]) == 0

    assert capsys.readouterr().err.count("redacted 4 documents") == 2
    written = [path.read_bytes() for path in Path("out").rglob("*") if path.is_file()]
    stored = [ids for name in ("nmt", "sft") for ids in documents(f"out/{name}")]
    texts = [bytes(token for token in ids if token < 256) for ids in stored]
    assert len(texts) == 8
    assert sum(each.count(b"<IBAN>") for each in texts) == 4
    for value in VALUES:
        assert not any(value.encode() in each for each in [*written, *texts]), value
    transform = json.loads(Path("out/sft/manifest.json").read_bytes())["provenance"]["transforms"][
        0
    ]
    assert transform["redaction"]["documents_changed"] == 4
