"""A conversion appears whole or not at all, leaves the source alone, survives breaking anywhere."""

from __future__ import annotations

import hashlib
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
    RecordingDisk,
    ShortDisk,
    materialise,
    refused,
    states_after_power_loss,
)

from mds_ckpt import commit, convert, open_checkpoint, verify
from mds_ckpt.errors import (
    CheckpointError,
    LockedError,
    MachineError,
    RejectedError,
    UsageError,
)

MODEL = samples.model("gpt2", num_layers=1, hidden_size=4, num_attention_heads=2, vocab_size=5)
WEIGHTS = samples.arrays(MODEL)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "ckpt", MODEL, WEIGHTS, optimizer=True)


def digest(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def is_right(folder: Path, weights: dict[str, Any]) -> bool:
    tensors = open_checkpoint(folder).tensors
    return all(np.array_equal(tensors[name].numpy(), array) for name, array in weights.items())


@pytest.mark.parametrize(("to", "make"), [("hf", Killed), ("mds", refused)])
def test_breaking_at_any_operation_leaves_nothing_or_all(
    source: Path, tmp_path: Path, to: str, make: Any
) -> None:
    before = digest(source)
    outcomes = set()
    for at in count():
        folder = tmp_path / f"at-{at}"
        folder.mkdir()
        try:
            convert(source, folder / "out", to=to, operations=BreakingDisk(at=at, make=make))
        except (Killed, OSError):
            pass
        else:
            break

        there = (folder / "out").exists()
        outcomes.add(there)
        if there:
            assert is_right(folder / "out", WEIGHTS)
        if make is refused:
            assert [path.name for path in folder.iterdir()] == ["out"] * there
        convert(source, folder / "out", to=to, overwrite=True)
        assert is_right(folder / "out", WEIGHTS)
        assert [path.name for path in folder.iterdir()] == ["out"]
        shutil.rmtree(folder)
    assert outcomes == {False, True}
    assert digest(source) == before


@pytest.mark.parametrize("make", [Killed, refused])
def test_replacing_leaves_old_or_new(source: Path, tmp_path: Path, make: Any) -> None:
    old = {name: array + 1 for name, array in WEIGHTS.items()}
    convert(samples.save(tmp_path / "old", MODEL, old), tmp_path / "first", to="hf")
    for at in count():
        folder = tmp_path / f"at-{at}"
        folder.mkdir()
        shutil.copytree(tmp_path / "first", folder / "out")
        disk = BreakingDisk(at=at, make=make)
        try:
            convert(source, folder / "out", to="hf", overwrite=True, operations=disk)
        except (Killed, OSError):
            pass
        else:
            break

        with pytest.raises(RejectedError, match="add --overwrite"):  # tidies up, then sees it there
            convert(source, folder / "out", to="hf")
        assert is_right(folder / "out", old) != is_right(folder / "out", WEIGHTS)
        assert [path.name for path in folder.iterdir()] == ["out"]
        shutil.rmtree(folder)


@pytest.mark.parametrize("to", ["mds", "hf", "deepspeed", "megatron", "mcore"])
def test_writes_that_end_early_are_continued(source: Path, tmp_path: Path, to: str) -> None:
    convert(source, tmp_path / "out", to=to, weights_only=True, operations=ShortDisk())

    assert not verify(tmp_path / "out").problems
    assert is_right(tmp_path / "out", WEIGHTS)


def test_power_loss_leaves_nothing_or_all(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (tmp_path / "before").mkdir()
    disk = _WithLock(folder)

    convert(source, folder / "out", to="mds", operations=disk)

    (tmp_path / "states").mkdir()
    for number, (done, tree) in enumerate(states_after_power_loss(tmp_path / "before", disk)):
        state = materialise(tree, tmp_path / "states" / str(number))
        if (state / "out").exists():
            assert verify(state / "out").problems == ()
        assert (state / "out").exists() or done < len(disk.log)


class _WithLock(RecordingDisk):
    """The lock file is not written through the disk, so its removal is not recorded either."""

    def remove(self, path: Path) -> None:
        if path.name == ".mds-lock":
            path.unlink()
        else:
            super().remove(path)


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    names = sorted(path.name for path in tmp_path.iterdir())

    report = convert(source, tmp_path / "out", to="hf", dry_run=True)

    assert report.dry_run
    assert report.num_written == len(WEIGHTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_too_little_room_is_said_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))

    with pytest.raises(MachineError, match=r"has 10 bytes free and \d+ are needed"):
        convert(source, tmp_path / "out", to="hf")
    assert not list(tmp_path.glob("out*"))


def test_a_target_that_would_touch_the_source_is_refused(source: Path, tmp_path: Path) -> None:
    before = digest(tmp_path)
    for target in (source, source / "out", source.parent, source.parent / "x", tmp_path):
        with pytest.raises(UsageError, match=r"inside the source|not a folder"):
            convert(source.parent, target, to="hf", overwrite=True)
    link = tmp_path / "link"
    link.symlink_to(source)
    with pytest.raises(UsageError, match="is a link"):
        convert(source, link, to="hf", overwrite=True)
    with pytest.raises(UsageError, match="inside the source"):
        convert(source, link / "out", to="hf")
    link.unlink()
    assert digest(tmp_path) == before


def test_a_target_that_is_there_is_kept_unless_it_is_a_checkpoint_to_replace(
    source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "thesis.txt").write_text("years of work")

    with pytest.raises(RejectedError, match="is there already; add --overwrite"):
        convert(source, target, to="hf")
    with pytest.raises(RejectedError, match="is not a checkpoint and is not replaced"):
        convert(source, target, to="hf", overwrite=True)

    assert (target / "thesis.txt").read_text() == "years of work"


def test_a_conversion_that_still_runs_is_left_alone(source: Path, tmp_path: Path) -> None:
    running = tmp_path / "out.partial-abcd1234"
    running.mkdir()
    with commit.lock(running), pytest.raises(LockedError, match="another conversion"):
        convert(source, tmp_path / "out", to="hf")
    convert(source, tmp_path / "out", to="hf")
    assert not running.exists()


def test_a_source_that_is_named_like_remains_is_not_tidied_away(
    source: Path, tmp_path: Path
) -> None:
    odd = tmp_path / "out.partial-abcd1234"
    shutil.copytree(source, odd)

    convert(odd, tmp_path / "out", to="hf")

    assert is_right(odd, WEIGHTS)
    assert is_right(tmp_path / "out", WEIGHTS)


def test_optimizer_state_and_counters_stay_with_mds_unless_left_behind(
    source: Path, tmp_path: Path
) -> None:
    convert(source, tmp_path / "all", to="mds")
    report = convert(source, tmp_path / "weights", to="mds", weights_only=True)

    kept, left = open_checkpoint(tmp_path / "all"), open_checkpoint(tmp_path / "weights")
    assert list(kept.states) == ["weight", "exp_avg"]
    assert (kept.step, kept.counters["consumed_samples"]) == (1, 8)
    assert kept.manifest is not None
    assert kept.manifest.parent is not None
    assert kept.manifest.parent["uuid"] == commit.read_manifest(source).uuid
    assert list(left.states) == ["weight"]
    assert (left.step, left.counters) == (0, {})
    assert report.dropped == {"exp_avg: only weights were asked for": len(WEIGHTS)}


def test_wrong_requests_are_usage_errors(source: Path, tmp_path: Path) -> None:
    requests: list[dict[str, Any]] = [
        {"to": "gguf"},
        {"to": "safetensors"},
        {"to": "hf", "dtype": "I8"},
        {"to": "hf", "jobs": 0},
        {"to": "hf", "source_format": "nonsense"},
    ]
    for request in requests:
        with pytest.raises(UsageError):
            convert(source, tmp_path / "out", **request)
    with pytest.raises(UsageError, match="create it first"):
        convert(source, tmp_path / "no" / "out", to="hf")


def test_a_damaged_source_leaves_nothing(source: Path, tmp_path: Path) -> None:
    path = source / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    with pytest.raises(CheckpointError, match="checksum"):
        convert(source, tmp_path / "out", to="mds")
    assert not list(tmp_path.glob("out*"))
