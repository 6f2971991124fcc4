"""A killed run goes on from its last checkpoint, and its store has the bytes of a whole run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from store_material import KilledAt, run_killed
from text_material import small_tokenizer, text, write_jsonl

from mds_data import StoreError, open_store
from mds_data.cli import main
from mds_data.preprocess import (
    InputError,
    PreprocessConfig,
    SentenceConfig,
    pipeline,
    preprocess,
    source,
)
from mds_data.store import new_store, writer
from mds_data.store.verify import verify_store
from mds_data.tokenizers import spec_of_file

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut small batches, chunks and shards, so that few documents cross many borders."""
    monkeypatch.setattr(source, "_BATCH_BYTES", 4000)
    for module, name in ((writer, "layout_for_tokens"), (new_store, "layout_for_documents")):
        usual = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda *arguments, usual=usual, name=name, **options: replace(
                usual(*arguments, **options),
                chunk=7 if name == "layout_for_documents" else 512,
                chunks_per_shard=3,
            ),
        )
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")


@pytest.fixture
def material(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_bytes(small_tokenizer())
    for part in range(2):
        lines = [{"text": text(n, words=150), "title": text(n)} for n in range(part, 30, 2)]
        broken = ['{"text": \n'] if part else []
        (tmp_path / f"{part}.jsonl").write_text(
            "".join([json.dumps(line) + "\n" for line in lines[:4]] + broken)
            + "".join(json.dumps(line) + "\n" for line in lines[4:])
        )
    return tmp_path


def config(folder: Path, **options) -> PreprocessConfig:
    settings = {
        "inputs": (str(folder / "0.jsonl"), str(folder / "1.jsonl")),
        "outputs": {"text": folder / "store"},
        "tokenizer": spec_of_file(folder / "tokenizer.json"),
        "append_eod": True,
        "on_error": "skip",
        "checkpoint_batches": 2,
    }
    return PreprocessConfig(**settings | options)


def digests(store: Path) -> dict[str, str]:
    return {
        path.relative_to(store).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(store.rglob("*"))
        if path.is_file()
    }


def stop_after(monkeypatch: pytest.MonkeyPatch, checkpoints: int) -> None:
    """Let the run fail in the batch after so many checkpoints."""
    left = iter(range(checkpoints))
    keep = writer.StoreWriter.checkpoint

    def checkpoint(self: writer.StoreWriter, state: dict[str, object]) -> None:
        if next(left, None) is None:
            raise OSError(28, "No space left on device")
        keep(self, state)

    monkeypatch.setattr(writer.StoreWriter, "checkpoint", checkpoint)


@needs_fork
@pytest.mark.timeout(240)
@pytest.mark.parametrize("torn", [False, True])
def test_a_run_killed_at_any_file_operation_goes_on_to_the_same_bytes(
    material: Path, monkeypatch: pytest.MonkeyPatch, torn: bool
) -> None:
    preprocess(config(material, outputs={"text": material / "whole"}))
    expected = digests(material / "whole")
    seen = set()

    def killed(operations: KilledAt) -> None:
        monkeypatch.setattr(writer, "FileOperations", lambda: operations)
        preprocess(config(material))

    died, last = True, 0 if torn else 2
    while died:
        last += 5  # All of them take too long for every day; each was tried.
        died = run_killed(killed, last, torn=torn)
        seen.add(len(list(material.glob("store.partial-*/resume.json"))))
        preprocess(config(material, resume=True))
        assert digests(material / "store") == expected, last
        assert not list(material.glob("store.*"))
        shutil.rmtree(material / "store")

    assert last > 100
    assert seen == {0, 1}


@pytest.mark.timeout(60)
def test_a_run_killed_in_its_workers_goes_on_with_another_number_of_them(material: Path) -> None:
    write_jsonl(material / "0.jsonl", [text(n, words=3000) for n in range(150)])
    command = [sys.executable, "-m", "mds_data", "preprocess", "--append-eod"]
    command += ["--input", "0.jsonl", "--tokenizer", "tokenizer.json", "--output", "store"]
    whole = subprocess.run([*command[:-1], "whole", "--workers", "1"], cwd=material, check=True)
    assert whole.returncode == 0

    process = subprocess.Popen(
        [*command, "--workers", "2", "--checkpoint-mb", "1"], cwd=material, stderr=subprocess.PIPE
    )
    while process.poll() is None and not list(material.glob("store.partial-*/resume.json")):
        pass
    process.send_signal(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
    process.communicate()
    if not (material / "store").exists():  # On a busy machine it may have been quicker than we.
        assert main(["inspect", str(material / "store")]) == 3
    subprocess.run([*command, "--workers", "1", "--resume"], cwd=material, check=True)

    assert digests(material / "store") == digests(material / "whole")


def test_a_finished_run_that_is_resumed_changes_nothing(material: Path) -> None:
    first = preprocess(config(material))
    before = (material / "store" / "manifest.json").stat().st_ino

    again = preprocess(config(material, resume=True))

    assert (material / "store" / "manifest.json").stat().st_ino == before
    assert (again.documents, again.tokens) == (first.documents, first.tokens)
    assert again.problems.counts == first.problems.counts == {"broken": 1}


@pytest.mark.parametrize("checkpoints", [1, 2, 3])
def test_several_keys_go_on_together_although_one_was_ahead(
    material: Path, monkeypatch: pytest.MonkeyPatch, checkpoints: int
) -> None:
    keys = {"text": material / "text", "title": material / "title"}
    options = {"sentences": SentenceConfig(), "problems": material / "problems.jsonl"}
    preprocess(config(material, outputs=keys, **options))
    expected = {key: digests(path) for key, path in keys.items()}
    problems = (material / "problems.jsonl").read_bytes()
    for path in keys.values():
        shutil.rmtree(path)
    (material / "problems.jsonl").unlink()

    with monkeypatch.context() as patch:
        stop_after(patch, checkpoints)
        with pytest.raises(OSError, match="No space left") as caught:
            preprocess(config(material, outputs=keys, **options))
    kept = [bool(list(material.glob(f"{key}.partial-*/resume.json"))) for key in keys]
    preprocess(config(material, outputs=keys, resume=True, **options))

    assert kept == [True, checkpoints > 1]
    assert caught.value.__notes__ == [
        "What was done is kept: go on by --resume, or drop it by --overwrite."
    ]
    assert {key: digests(path) for key, path in keys.items()} == expected
    assert (material / "problems.jsonl").read_bytes() == problems


def interrupted(
    material: Path, monkeypatch: pytest.MonkeyPatch, *, checkpoints: int = 2, **options
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, checkpoints)
        with pytest.raises(OSError, match="No space left"):
            preprocess(config(material, **options))


def test_an_unfinished_run_is_not_thrown_away_by_chance(
    material: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(material, monkeypatch)

    with pytest.raises(StoreError, match=r"unfinished run.*--resume.*--overwrite"):
        preprocess(config(material))
    preprocess(config(material, overwrite=True))

    assert verify_store(material / "store").sound
    assert not list(material.glob("store.*"))


def test_another_job_does_not_go_on_with_it(
    material: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(material, monkeypatch)

    with pytest.raises(StoreError, match=r"of another job \(append_eod differ\)"):
        preprocess(config(material, append_eod=False, resume=True))


@pytest.mark.parametrize("checkpoints", [1, 2])
def test_a_changed_input_is_noticed(
    material: Path, monkeypatch: pytest.MonkeyPatch, checkpoints: int
) -> None:
    """Whether the run was still at the file, or done with it."""
    interrupted(material, monkeypatch, checkpoints=checkpoints)
    first = material / "0.jsonl"
    data = first.read_bytes()

    first.write_bytes(data.replace(b"the", b"THE", 1))
    with pytest.raises(InputError, match=r"0\.jsonl was changed since"):
        preprocess(config(material, resume=True))
    first.write_bytes(data.replace(b"\n", b" "))
    with pytest.raises(InputError, match=r"0\.jsonl was changed since"):
        preprocess(config(material, resume=True))
    first.write_bytes(data)  # Another date, the same content.
    preprocess(config(material, resume=True))

    assert len(open_store(material / "store")) == 30


@pytest.mark.parametrize("damage", ["cut", "garbage", "array"])
def test_a_damaged_checkpoint_is_named(
    material: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    interrupted(material, monkeypatch)
    (kept,) = material.glob("store.partial-*/resume.json")
    if damage == "cut":
        kept.write_bytes(kept.read_bytes()[:-100])
    elif damage == "garbage":
        kept.write_text('{"version": 1, "arrays": 7}')
    else:
        members = json.loads(kept.read_bytes())
        members["arrays"]["tokens"]["chunk_sizes"] = [10**6]
        kept.write_text(json.dumps(members))
        (kept.parent / "tokens" / "c").mkdir(parents=True, exist_ok=True)
        (kept.parent / "tokens" / "c" / "0").write_bytes(b"short")

    with pytest.raises(StoreError, match=r"resume\.json|not what the interrupted run wrote"):
        preprocess(config(material, resume=True))


def test_resuming_over_a_store_replaces_it_in_the_end(
    material: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocess(config(material, append_eod=False))
    interrupted(material, monkeypatch, overwrite=True)
    assert open_store(material / "store").eod_id is None

    preprocess(config(material, overwrite=True, resume=True))

    assert open_store(material / "store").eod_id is not None
    assert not list(material.glob("store.*"))


@needs_fork
def test_a_run_killed_before_it_swaps_the_stores_goes_on(material: Path) -> None:
    preprocess(config(material, append_eod=False))

    def killed(operations: KilledAt) -> None:
        pipeline.settle_output = lambda *_, **__: os._exit(9)
        preprocess(config(material, overwrite=True))

    assert run_killed(killed, 0)
    report = preprocess(config(material, overwrite=True, resume=True))

    assert report.documents == {"text": 30}
    assert open_store(material / "store").eod_id is not None
    assert not list(material.glob("store.*"))
