"""A copy is the original, byte for byte, or it is not there."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from mds_ckpt import commit, verify
from mds_ckpt.encryption.keys import new_identity
from mds_ckpt.formats.mds import merge_rank_files, write_rank_file
from mds_ckpt.manifest import CheckpointManifest, ModelRecord
from mds_train.saving.backup import back_up, backed_up_steps, bring_back, copy_checkpoint


def write_checkpoint(root: Path, *, step: int = 4, fill: float = 1.0) -> Path:
    partial = commit.stage(root, step)
    array = np.full((3, 5), fill, dtype=np.float32)
    written = write_rank_file(partial, 0, [("w", "weight", ((0, 3), (0, 5)), None, array)])
    parameters, files = merge_rank_files({"w": (3, 5)}, [written])
    manifest = CheckpointManifest(
        uuid=f"00000000-0000-0000-0000-{step:06d}{int(fill):06d}",
        created="2026-01-01T00:00:00Z",
        producer={"name": "test", "version": "0"},
        step=step,
        counters={"iteration": step},
        model=ModelRecord(family="gpt", config={}, vocab_size=5, tied_embeddings=True),
        parameters=parameters,
        files=files,
    )
    return commit.publish(partial, manifest, root=root)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Faulty(commit.FileOperations):
    """A disk that changes a bit, or that is full."""

    def __init__(self, *, full: bool) -> None:
        self.full = full

    def write(self, file: BinaryIO, data: memoryview) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        changed = bytearray(data)
        changed[-1] ^= 1
        super().write(file, memoryview(changed))


def test_the_copy_is_the_original_byte_for_byte(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "config.toml").write_text("[train]\n")

    copy = back_up(source, tmp_path / "second", keep_last=2, keep_every=None)

    assert copy == tmp_path / "second" / "checkpoints" / "step-4"
    assert contents(copy) == contents(source)
    assert (tmp_path / "second" / "config.toml").read_text() == "[train]\n"
    assert (tmp_path / "second" / "checkpoints" / "latest").read_text() == "step-4\n"
    assert not verify(copy).problems


def test_what_is_there_already_is_not_copied_again_and_another_is_replaced(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "run" / "checkpoints", fill=2.0)
    root = tmp_path / "second" / "checkpoints"
    write_checkpoint(root, fill=1.0)

    copy = copy_checkpoint(source, root)
    before = copy.stat().st_ino
    copy_checkpoint(source, root)

    assert contents(copy) == contents(source)
    assert copy.stat().st_ino == before


def test_old_copies_go_as_in_the_first_place(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        source = write_checkpoint(tmp_path / "run" / "checkpoints", step=step)
        back_up(source, tmp_path / "second", keep_last=2, keep_every=None)

    names = [folder.name for folder in commit.step_folders(tmp_path / "second" / "checkpoints")]

    assert names == ["step-3", "step-2"]


@pytest.mark.parametrize(("full", "message"), [(True, "No space left"), (False, "has the digest")])
def test_a_faulty_copy_is_no_copy(tmp_path: Path, *, full: bool, message: str) -> None:
    source = write_checkpoint(tmp_path / "run" / "checkpoints")
    root = tmp_path / "second" / "checkpoints"
    root.mkdir(parents=True)

    with pytest.raises((OSError, ValueError), match=message):
        copy_checkpoint(source, root, operations=Faulty(full=full))

    assert list(root.iterdir()) == []


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_url_holds_backups_that_can_be_brought_back(tmp_path: Path, *, encrypted: bool) -> None:
    url = f"memory://{tmp_path.name}"
    identity = None
    if encrypted:
        identity = str(tmp_path / "key.txt")
        new_identity(Path(identity))
    for step in (1, 2, 3):
        source = write_checkpoint(tmp_path / "run" / "checkpoints", step=step)
        where = back_up(source, url, keep_last=2, keep_every=None, identity=identity)

    folder = bring_back(url, 3, tmp_path / "restored", identity=identity)
    again = bring_back(url, 3, tmp_path / "restored", identity=identity)

    assert where == f"{url} (step-3)"
    assert backed_up_steps(url) == [2, 3]
    assert folder == again == tmp_path / "restored" / "step-3"
    assert contents(folder) == contents(source)


def test_a_damaged_rest_is_brought_back_anew(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    source = write_checkpoint(tmp_path / "run" / "checkpoints")
    back_up(source, url, keep_last=0, keep_every=None)
    folder = bring_back(url, 4, tmp_path / "restored", identity=None)
    next(folder.glob("rank-*")).write_bytes(b"")

    bring_back(url, 4, tmp_path / "restored", identity=None)

    assert contents(folder) == contents(source)
