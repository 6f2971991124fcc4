"""Preprocessing end to end: the store's content, its independence of workers, and how it fails."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from text_material import byte_tokenizer, golden, small_tokenizer, text, write_jsonl

from mds_data import StoreError, open_store
from mds_data.preprocess import (
    InputError,
    PreprocessConfig,
    PreprocessReport,
    Progress,
    SentenceConfig,
    preprocess,
)
from mds_data.preprocess.workers import WorkerError, map_in_order
from mds_data.store.commit import FileOperations
from mds_data.tokenizers import TokenizerError, TokenizerSpec, spec_of_file


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(small_tokenizer())
    return path


def run(
    folder: Path, *inputs: Path, output: str = "store", tokenizer: Path | None = None, **options
) -> PreprocessReport:
    path = tokenizer or folder / "tokenizer.json"
    progress = options.pop("on_progress", None)
    config = PreprocessConfig(
        inputs=tuple(map(str, inputs)),
        outputs={"text": folder / output},
        tokenizer=spec_of_file(path),
        **{"append_eod": True} | options,
    )
    return preprocess(config, on_progress=progress)


def left_over(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith("store")]


def test_documents_come_back_with_their_end_token(tmp_path: Path, tokenizer: Path) -> None:
    texts = [text(n) for n in range(20)]

    report = run(tmp_path, write_jsonl(tmp_path / "in.jsonl", texts), split="90,10,0")

    store = open_store(tmp_path / "store")
    from mds_data.tokenizers import load_tokenizer

    backend = load_tokenizer(spec_of_file(tokenizer))
    assert len(store) == 20
    assert report.tokens["text"] == sum(map(len, store))
    for document, expected in zip(store, texts, strict=True):
        assert document[-1] == store.eod_id
        assert backend.decode(document[:-1]) == expected
    assert store.manifest.split == {"train": (0.0, 0.9), "valid": (0.9, 1.0), "test": (1.0, 1.0)}


def test_the_manifest_says_where_the_tokens_come_from(tmp_path: Path, tokenizer: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["a", "", "b"])

    run(tmp_path, source)

    manifest = open_store(tmp_path / "store").manifest
    data = source.read_bytes()
    assert manifest.tokenizer is not None
    assert manifest.tokenizer.sha256 == hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    assert (tmp_path / "store" / manifest.tokenizer.file).read_bytes() == tokenizer.read_bytes()
    assert manifest.provenance["inputs"] == [
        {"path": source.as_posix(), "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    ]
    (transform,) = manifest.provenance["transforms"]
    assert transform["name"] == "preprocess"
    assert transform["arguments"]["append_eod"] is True
    assert transform["report"]["empty"]["first"][0]["line"] == 2


def test_without_append_eod_the_store_names_no_end_token(tmp_path: Path, tokenizer: Path) -> None:
    run(tmp_path, write_jsonl(tmp_path / "in.jsonl", ["the store"]), append_eod=False)

    store = open_store(tmp_path / "store")
    assert store.eod_id is None
    assert 0 not in store[0]


def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path, tokenizer: Path) -> None:
    sources = [
        write_jsonl(tmp_path / f"{part}.jsonl", [text(n, words=3000) for n in range(part, 60, 3)])
        for part in range(3)
    ]
    (tmp_path / "0.jsonl.gz").write_bytes(gzip.compress(sources[0].read_bytes()))
    sources[0] = tmp_path / "0.jsonl.gz"

    for workers in (1, 3):
        run(tmp_path, *sources, output=f"store{workers}", workers=workers)

    one, three = (open_store(tmp_path / f"store{workers}") for workers in (1, 3))
    assert one.manifest.files == three.manifest.files
    assert one.manifest.provenance == three.manifest.provenance
    assert len(one) == 60


def test_a_broken_line_stops_the_work_and_leaves_nothing(tmp_path: Path, tokenizer: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "fine"}\n{"text": \n{"text": "fine"}\n')

    with pytest.raises(InputError, match=r"in\.jsonl, line 2: not JSON.*--on-error skip"):
        run(tmp_path, source)

    assert left_over(tmp_path) == []


def test_a_broken_line_can_be_skipped_and_is_counted(tmp_path: Path, tokenizer: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "fine"}\n{"text": \n{"text": "fine"}\n')

    report = run(tmp_path, source, on_error="skip")

    assert report.documents == {"text": 2}
    assert report.problems.num_errors == 1
    assert report.problems.sentences() == [
        f"skipped 1 not JSON or not UTF-8: {source.as_posix()} line 2"
    ]


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_an_input_without_documents_is_refused(
    tmp_path: Path, tokenizer: Path, content: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(content)

    with pytest.raises(InputError, match="no document is left for key 'text'"):
        run(tmp_path, source)

    assert left_over(tmp_path) == []


def test_a_cut_gzip_file_leaves_nothing(tmp_path: Path, tokenizer: Path) -> None:
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes(gzip.compress(b'{"text": "a"}\n' * 5000)[:-20])

    with pytest.raises(InputError, match="damaged or cut"):
        run(tmp_path, source, on_error="skip")

    assert left_over(tmp_path) == []


def test_an_existing_store_is_kept_unless_overwriting_was_asked_for(
    tmp_path: Path, tokenizer: Path
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["the first"])
    run(tmp_path, source)
    write_jsonl(source, ["the second", "the third"])

    with pytest.raises(StoreError, match=r"exists.*--overwrite"):
        run(tmp_path, source)
    assert len(open_store(tmp_path / "store")) == 1

    run(tmp_path, source, overwrite=True)

    assert len(open_store(tmp_path / "store")) == 2
    assert left_over(tmp_path) == ["store"]


def test_a_failed_replacement_keeps_the_old_store(tmp_path: Path, tokenizer: Path) -> None:
    run(tmp_path, write_jsonl(tmp_path / "in.jsonl", ["the first"]))

    with pytest.raises(InputError):
        run(tmp_path, write_jsonl(tmp_path / "empty.jsonl", [""]), overwrite=True)

    assert len(open_store(tmp_path / "store")) == 1
    assert left_over(tmp_path) == ["store"]


def test_a_folder_that_is_no_store_is_never_replaced(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.tex").write_text("years of work")

    with pytest.raises(StoreError, match="no token store"):
        run(tmp_path, write_jsonl(tmp_path / "in.jsonl", ["a"]), overwrite=True)

    assert (tmp_path / "store" / "thesis.tex").exists()


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [text(n, words=2000) for n in range(20)])
    monkeypatch.setattr(FileOperations, "write", _disk_full)

    with pytest.raises(OSError, match="No space left") as caught:
        run(tmp_path, source)

    assert caught.value.errno == errno.ENOSPC
    assert left_over(tmp_path) == []


def _disk_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_append_eod_needs_an_end_token(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(byte_tokenizer().replace(b"<eod>", b"<odd>"))

    with pytest.raises(TokenizerError, match=r"no token that ends a document.*--eod-token"):
        run(tmp_path, write_jsonl(tmp_path / "in.jsonl", ["a"]), tokenizer=path)


def test_progress_ends_with_everything_read(tmp_path: Path, tokenizer: Path) -> None:
    seen: list[Progress] = []
    source = write_jsonl(tmp_path / "in.jsonl", [text(n) for n in range(10)])

    run(tmp_path, source, on_progress=seen.append)

    assert seen[-1].bytes_done == seen[-1].bytes_total == source.stat().st_size
    assert seen[-1].documents == 10


def _die(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
    return number


def _fail(number: int) -> int:
    if number == 3:
        raise ValueError("number 3 is odd")
    return number


def _make_die():
    return _die


def _make_fail():
    return _fail


@pytest.mark.timeout(60)
def test_a_killed_worker_is_an_error_and_no_endless_wait() -> None:
    with pytest.raises(WorkerError, match="wanted too much memory"):
        list(map_in_order(range(20), make=_make_die, workers=2))


@pytest.mark.timeout(60)
def test_a_script_without_a_guard_is_told_so(tmp_path: Path, tokenizer: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [text(1)])
    script = tmp_path / "script.py"
    script.write_text(
        "from mds_data.cli import main\n"
        "arguments = ['preprocess', '--input', 'in.jsonl', '--tokenizer', 'tokenizer.json']\n"
        "main([*arguments, '--workers', '2', '--output', 'store'])\n"
    )

    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert "RuntimeError: a worker process began the script anew: put the call under" in done.stderr
    assert "calls this outside of `if __name__ == '__main__':`" in done.stderr
    assert not (tmp_path / "store").exists()


@pytest.mark.timeout(60)
def test_a_workers_exception_reaches_the_caller_and_items_are_read_only_as_needed() -> None:
    read: list[int] = []

    def items():
        for number in range(1000):
            read.append(number)
            yield number

    with pytest.raises(ValueError, match="number 3 is odd"):
        list(map_in_order(items(), make=_make_fail, workers=2))

    assert len(read) <= 8


def byte_store(folder: Path, source: Path, **options) -> PreprocessReport:
    path = folder / "tokenizer.json"
    path.write_bytes(byte_tokenizer())
    return run(folder, source, tokenizer=path, **options)


def test_case_b01_empty_documents(tmp_path: Path) -> None:
    folder = golden("cases") / "B01"
    (expected,) = [
        case
        for name, case in json.loads((folder / "expected.json").read_text()).items()
        if name.startswith("in.jsonl without")
    ]

    with pytest.raises(InputError, match=r"in\.jsonl, line 6: no key 'text'"):
        byte_store(tmp_path, folder / "in.jsonl")
    report = byte_store(tmp_path, folder / "in.jsonl", on_error="skip")

    store = open_store(tmp_path / "store")
    assert [document.tolist() for document in store] == expected["sequences"]
    assert store.doc_length.tolist() == expected["lengths"]
    examples = report.problems.examples
    assert [p.line for p in examples["empty"]] == expected["skipped_empty_lines"]
    assert [p.line for p in examples["no-key"]] == [6]
    assert [p.line for p in examples["not-text"]] == [7]
    with pytest.raises(InputError, match="no document is left"):
        byte_store(tmp_path, folder / "in_all_empty.jsonl", output="store2")


@pytest.mark.parametrize("workers", [1, 2])
def test_case_b12_order_of_the_input_at_any_number_of_workers(tmp_path: Path, workers: int) -> None:
    folder = golden("cases") / "B12"
    expected = json.loads((folder / "expected.json").read_text())

    byte_store(tmp_path, folder / "in.jsonl", workers=workers)

    store = open_store(tmp_path / "store")
    stream = np.concatenate(list(store)).astype("<u4")
    digest = expected["sha256 of the token stream as little-endian uint32"]
    assert len(store) == expected["documents"]
    assert len(stream) == expected["total_tokens"]
    assert stream[:20].tolist() == expected["first_20_tokens"]
    assert hashlib.sha256(stream.tobytes()).hexdigest() == digest


def test_sentences_keep_their_lengths_and_the_end_belongs_to_the_last(
    tmp_path: Path, tokenizer: Path
) -> None:
    source = tmp_path / "in.jsonl"
    lines = [
        {"text": "The store. A copy of it."},
        {"text": ["One. Two.", "", "three"]},
        {"text": ""},
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))

    byte_store(tmp_path, source, sentences=SentenceConfig())

    store = open_store(tmp_path / "store")
    assert store.sentence_length.tolist() == [10, 14, 9, 6]
    assert store.doc_sentences.tolist() == [2, 2]
    assert store.doc_length.tolist() == [24, 15]
    with pytest.raises(InputError, match="a list of sentences is read by --split-sentences"):
        byte_store(tmp_path, source, output="store2")


def test_sentences_of_the_originals_file_have_the_originals_tokens(tmp_path: Path) -> None:
    folder = golden("fixtures") / "datasets"
    config = PreprocessConfig(
        inputs=(str(folder / "pydoc_ss.jsonl"),),
        outputs={"text": tmp_path / "store"},
        tokenizer=TokenizerSpec(kind="bert-wordpiece", path=folder / "bertwp-vocab.txt"),
        sentences=SentenceConfig(),
    )

    preprocess(config)

    store = open_store(tmp_path / "store")
    golden_pair = open_store(folder / "pydocss_text_sentence")
    assert store.doc_sentences.tolist() == golden_pair.doc_sentences.tolist()
    assert store.sentence_length.tolist() == golden_pair.sentence_length.tolist()
    for ours, theirs in zip(store, golden_pair, strict=True):
        assert np.array_equal(ours, theirs)
