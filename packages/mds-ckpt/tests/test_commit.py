"""Saving survives a kill, a full disk and a power loss at every single operation."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import ckpt_samples as samples
import numpy as np
import pytest
from ckpt_disks import (
    BreakingDisk,
    Killed,
    LyingDisk,
    RecordingDisk,
    ShortDisk,
    materialise,
    refused,
    states_after_power_loss,
)

from mds_ckpt import commit, open_checkpoint
from mds_ckpt.errors import CheckpointError, LockedError, RejectedError, UsageError

MODEL = samples.model("gpt2", num_layers=1, hidden_size=4, num_attention_heads=2, vocab_size=5)
# Three tensors are enough here: every one more is two operations more at which to break.
WEIGHTS = {step: dict(list(samples.arrays(MODEL, seed=step).items())[:3]) for step in range(6)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with the checkpoint of step 1."""
    samples.save(tmp_path / "ckpt", MODEL, WEIGHTS[1], step=1)
    return tmp_path / "ckpt"


def save(root: Path, step: int, **options: Any) -> Path:
    return samples.save(root, MODEL, WEIGHTS[step], step=step, **options)


def newest(root: Path) -> int:
    """Step of the newest checkpoint, whose numbers are checked to be that step's."""
    folder, _ = commit.find_latest(root)
    assert folder is not None
    checkpoint = open_checkpoint(folder)
    assert checkpoint.step is not None
    for name, array in WEIGHTS[checkpoint.step].items():
        assert np.array_equal(checkpoint.tensors[name].numpy(), array), name
    return checkpoint.step


def remains(root: Path) -> list[str]:
    return [
        entry.name
        for entry in root.iterdir()
        if ".partial-" in entry.name or ".replaced-" in entry.name
    ]


def test_a_save_appears_with_latest_and_leaves_nothing_else(root: Path) -> None:
    folder = save(root, 2)

    assert folder == root / "step-2"
    assert newest(root) == 2
    assert (root / "latest").read_text() == "step-2\n"
    assert sorted(entry.name for entry in root.iterdir()) == ["latest", "step-1", "step-2"]


@pytest.mark.parametrize("make", [Killed, refused])
def test_a_save_that_breaks_at_any_operation_leaves_old_or_new(
    root: Path, make: Any, tmp_path: Path
) -> None:
    seen = set()
    for at in count():
        work = shutil.copytree(root, tmp_path / f"at-{at}")
        disk = BreakingDisk(at=at, make=make)
        try:
            save(work, 2, operations=disk)
        except (Killed, OSError):
            pass
        else:
            assert at == disk.count
            break

        seen.add(newest(work))
        save(work, 3)
        assert newest(work) == 3
        assert remains(work) == []
        shutil.rmtree(work)

    assert seen == {1, 2}
    assert at >= 20, "the sweep has lost its operations"


def test_writes_that_end_early_are_continued(root: Path) -> None:
    save(root, 2, operations=ShortDisk())
    assert newest(root) == 2
    commit.check_folder(root / "step-2", digests=True)


def test_a_disk_that_takes_less_than_it_says_is_noticed(root: Path) -> None:
    with pytest.raises(OSError, match="took less than it said") as caught:
        save(root, 2, operations=LyingDisk())

    assert caught.value.filename is not None
    assert newest(root) == 1


@pytest.mark.parametrize("make", [Killed, refused])
def test_pruning_that_breaks_at_any_operation_keeps_what_it_should(
    root: Path, make: Any, tmp_path: Path
) -> None:
    for step in (2, 3, 4):
        save(root, step)
    for at in count():
        work = shutil.copytree(root, tmp_path / f"at-{at}")
        try:
            commit.prune(work, keep_last=2, operations=BreakingDisk(at=at, make=make))
        except (Killed, OSError):
            pass
        else:
            break

        assert newest(work) == 4
        for folder in commit.step_folders(work):
            commit.check_folder(folder, digests=True)
        commit.clean(work)
        commit.prune(work, keep_last=2)
        assert [folder.name for folder in commit.step_folders(work)] == ["step-4", "step-3"]
        assert remains(work) == []
        shutil.rmtree(work)
    assert at >= 8


@pytest.mark.parametrize("make", [Killed, refused])
def test_replacing_a_step_never_loses_both(root: Path, make: Any, tmp_path: Path) -> None:
    old = {name: array + 1 for name, array in WEIGHTS[1].items()}
    samples.save(root, MODEL, old, step=2)
    for at in count():
        work = shutil.copytree(root, tmp_path / f"at-{at}")
        try:
            save(work, 2, existing="replace", operations=BreakingDisk(at=at, make=make))
        except (Killed, OSError):
            pass
        else:
            break

        commit.clean(work)
        found = open_checkpoint(work / "step-2").tensors
        whole = [
            all(np.array_equal(found[name].numpy(), array) for name, array in side.items())
            for side in (old, WEIGHTS[2])
        ]
        assert whole.count(True) == 1
        assert remains(work) == []
        shutil.rmtree(work)


# Power loss --------------------------------------------------------------------------------------


def save_second(root: Path, disk: commit.FileOperations) -> None:
    save(root, 2, operations=disk)


def prune_first(root: Path, disk: commit.FileOperations) -> None:
    commit.prune(root, keep_last=1, operations=disk)


def before_pruning(root: Path) -> None:
    save(root, 2)


def nothing(root: Path) -> None:
    pass


PROGRAMS = pytest.mark.parametrize(
    ("prepare", "program"),
    [(nothing, save_second), (before_pruning, prune_first)],
    ids=["save", "prune"],
)


def faults_after_power_loss(before: Path, disk: RecordingDisk, folder: Path) -> str | None:
    """The first state that breaks a promise, from the end backwards."""
    for number, (done, tree) in enumerate(states_after_power_loss(before, disk)):
        state = materialise(tree, folder / str(number))
        fault = _fault(state, finished=done == len(disk.log))
        shutil.rmtree(state)
        if fault is not None:
            return f"after operation {done} of {len(disk.log)}: {fault}"
    return None


def _fault(state: Path, *, finished: bool) -> str | None:
    try:
        for folder in commit.step_folders(state):
            commit.check_folder(folder, digests=True)
    except CheckpointError as error:
        return f"a step folder is not complete: {error}"
    latest, _ = commit.find_latest(state)
    text = (state / "latest").read_text()
    if latest is None or latest.name not in {"step-1", "step-2"}:
        return "no checkpoint is left"
    if text not in {"step-1\n", "step-2\n"}:
        return f"latest reads {text!r}"
    if text == "step-2\n" and latest.name == "step-1":
        return "latest names what is not there"
    if finished and (latest.name, text) != ("step-2", "step-2\n"):
        return "the save returned, and is not there"
    return None


@PROGRAMS
def test_power_loss_at_any_operation_leaves_old_or_new(
    root: Path, tmp_path: Path, prepare: Any, program: Any
) -> None:
    prepare(root)
    before = shutil.copytree(root, tmp_path / "before")
    disk = RecordingDisk(root)
    program(root, disk)
    (tmp_path / "states").mkdir()

    assert faults_after_power_loss(before, disk, tmp_path / "states") is None


@PROGRAMS
def test_every_sync_and_every_rename_is_needed(
    root: Path, tmp_path: Path, prepare: Any, program: Any
) -> None:
    """Mutants: with any one of them left out, the test above fails."""
    prepare(root)
    before = shutil.copytree(root, tmp_path / "before")
    trial = RecordingDisk(shutil.copytree(before, tmp_path / "trial"))
    program(trial.root, trial)
    survivors = []
    for skip, name in enumerate(trial.skippable):
        work = shutil.copytree(before, tmp_path / f"work-{skip}")
        disk = RecordingDisk(work, skip=skip)
        states = tmp_path / f"states-{skip}"
        states.mkdir()
        try:
            program(work, disk)
        except (OSError, CheckpointError):
            continue
        if faults_after_power_loss(before, disk, states) is None:
            survivors.append(name)

    assert len(trial.skippable) == (10 if program is save_second else 2)
    assert survivors == []


# Finding, pruning, locking -----------------------------------------------------------------------


def test_the_newest_good_checkpoint_is_found_whatever_latest_says(root: Path) -> None:
    for step in (2, 3, 4):
        save(root, step)
    (root / "latest").write_text("../evil\n")
    (root / "step-4" / "manifest.json").unlink()
    data = root / "step-3" / "rank-00001.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    (root / "step-5").mkdir()
    (root / "step-6").symlink_to(root / "step-2")
    (root / "step-99.partial-abcd").mkdir()

    folder, skipped = commit.find_latest(root)

    assert folder == root / "step-2"
    reasons = {entry.folder.name: entry.reason for entry in skipped}
    assert list(reasons) == ["step-6", "step-5", "step-4", "step-3"]
    assert "is a link" in reasons["step-6"]
    assert "no such file" in reasons["step-5"]
    assert "no such file" in reasons["step-4"]
    assert "digest" in reasons["step-3"]
    assert commit.unfinished(root) == [root / "step-99.partial-abcd"]
    assert commit.find_latest(root, digests=False).folder == root / "step-3"


def test_a_missing_or_empty_folder_holds_no_checkpoint(tmp_path: Path) -> None:
    assert commit.find_latest(tmp_path / "nowhere") == (None, [])
    assert commit.find_latest(tmp_path) == (None, [])
    assert commit.unfinished(tmp_path / "nowhere") == []


def test_pruning_keeps_the_last_and_every_nth(root: Path) -> None:
    for step in (2, 3, 4, 5):
        save(root, step)

    removed = commit.prune(root, keep_last=1, keep_every=2)

    assert [folder.name for folder in removed] == ["step-3", "step-1"]
    assert [folder.name for folder in commit.step_folders(root)] == ["step-5", "step-4", "step-2"]
    with pytest.raises(UsageError, match="at least 1"):
        commit.prune(root, keep_last=0)


def test_pruning_does_not_count_what_is_not_complete(root: Path) -> None:
    save(root, 2)
    (root / "step-9").mkdir()

    commit.prune(root, keep_last=1)

    assert [folder.name for folder in commit.step_folders(root)] == ["step-9", "step-2"]


def test_an_existing_step_is_refused_unless_replacement_is_asked_for(root: Path) -> None:
    with pytest.raises(UsageError, match="is there already"):
        save(root, 1)
    assert newest(root) == 1


def test_cleaning_touches_nothing_that_is_not_ours(root: Path) -> None:
    names = ["notes.partial-abcd", "step-x.partial-abcd", "step-3.partial-../x", "other"]
    for name in names:
        (root / name.replace("/", "_")).mkdir()
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (root / "step-7.partial-abcd").symlink_to(outside)

    commit.clean(root)

    assert (outside / "precious").exists()
    assert not (root / "step-7.partial-abcd").is_symlink()
    assert all((root / name.replace("/", "_")).is_dir() for name in names)


def test_a_second_writer_is_told_who_holds_the_lock(root: Path) -> None:
    words = rf"being written.*{os.getpid()} on "
    with commit.lock(root), pytest.raises(LockedError, match=words), commit.lock(root):
        pass
    with commit.lock(root):
        pass


def _hold(root: Path, ready: Any) -> None:
    with commit.lock(root):
        ready.send(True)
        ready.recv()


def test_the_lock_of_a_killed_process_is_free(root: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    holder = multiprocessing.get_context("spawn").Process(target=_hold, args=(root, theirs))
    holder.start()
    assert ours.recv()
    with pytest.raises(LockedError), commit.lock(root):
        pass

    holder.kill()
    holder.join()

    with commit.lock(root):
        assert json.loads((root / ".mds-lock").read_text())["pid"] == os.getpid()


def test_a_lock_that_is_a_link_is_refused(root: Path, tmp_path: Path) -> None:
    (root / ".mds-lock").symlink_to(tmp_path / "victim")

    with pytest.raises(RejectedError, match="is a link"), commit.lock(root):
        pass
    assert not (tmp_path / "victim").exists()
