"""A checkpoint that is saved encrypted is the plain one under seal, whatever breaks meanwhile."""

from __future__ import annotations

import pickle
from itertools import count
from pathlib import Path

import ckpt_samples as samples
import numpy as np
import pytest
from ckpt_disks import BreakingDisk, Killed, refused

from mds_ckpt import KeySource, SealedError, commit, open_checkpoint, verify
from mds_ckpt.encryption.keys import new_identity
from mds_ckpt.files.file_operations import FileOperations
from mds_ckpt.formats.mds import Piece, merge_rank_files, write_rank_file
from mds_ckpt.manifest import CheckpointManifest
from mds_ckpt.protection import sealed_save
from mds_ckpt.protection.encrypt import decrypt_checkpoint
from mds_ckpt.protection.sealed_save import SealedSave, SealingOperations

MODEL = samples.model("gpt2", num_layers=1, hidden_size=4, num_attention_heads=2, vocab_size=5)


def weights_of(step: int) -> dict[str, np.ndarray]:
    return {"w": np.arange(700, dtype=np.float32).reshape(7, 100) + step}


@pytest.fixture
def key(tmp_path: Path) -> tuple[str, KeySource]:
    return new_identity(tmp_path / "key.txt"), KeySource(identity=tmp_path / "key.txt")


def save(
    root: Path, recipient: str, *, step: int, operations: FileOperations = commit.REAL
) -> Path:
    """Save as two ranks do, each of which holds half of the rows."""
    sealing = SealedSave(recipients=[recipient])
    partial = commit.stage(root, step, operations=operations)
    files, sealed = [], {}
    for rank, rows in enumerate([(0, 3), (3, 7)]):
        place = pickle.loads(pickle.dumps(sealing.place(f"rank-{rank:05d}.safetensors")))
        disk = SealingOperations(place, operations)
        array = weights_of(step)["w"][slice(*rows)]
        pieces = [Piece("w", "weight", (rows, (0, 100)), None, array)]
        files.append(write_rank_file(partial, rank, pieces, operations=disk))
        sealed[place.name] = disk.record
    parameters, records = merge_rank_files({"w": (7, 100)}, files)
    manifest = CheckpointManifest(
        producer={"name": "mds-train", "version": "0"},
        step=step,
        counters={"iteration": step},
        model=MODEL,
        parameters=parameters,
        files=records,
    )
    return sealing.publish(partial, manifest, sealed=sealed, root=root, operations=operations)


@pytest.mark.parametrize("segment", [64, 1 << 20])
def test_it_opens_as_what_was_saved(
    tmp_path: Path, key: tuple[str, KeySource], monkeypatch: pytest.MonkeyPatch, segment: int
) -> None:
    monkeypatch.setattr(sealed_save, "SEGMENT_SIZE", segment)

    folder = save(tmp_path / "run", key[0], step=3)

    opened = open_checkpoint(folder, key=key[1])
    assert np.array_equal(opened.tensors["w"].numpy(), weights_of(3)["w"])
    assert (opened.step, opened.counters) == (3, {"iteration": 3})
    assert not verify(folder, key=key[1]).problems
    decrypt_checkpoint(folder, tmp_path / "plain", key=key[1])  # compares every digest
    assert not verify(tmp_path / "plain").problems


def test_no_plain_byte_lies_in_the_folder(tmp_path: Path, key: tuple[str, KeySource]) -> None:
    folder = save(tmp_path / "run", key[0], step=1)

    written = b"".join(path.read_bytes() for path in folder.iterdir())

    row = weights_of(1)["w"][2].tobytes()
    assert row not in written
    assert row[:32] not in written
    assert b"rank-00000" not in written
    assert {path.name for path in folder.iterdir()} == {
        *("manifest.json", "manifest.sealed", "key-1.age"),
        *("000000.sealed", "000001.sealed"),
    }


def test_the_newest_whole_one_is_found_without_a_key(
    tmp_path: Path, key: tuple[str, KeySource]
) -> None:
    older, newer = (save(tmp_path / "run", key[0], step=step) for step in (1, 2))
    assert commit.find_latest(tmp_path / "run").folder == newer
    file = newer / "000001.sealed"
    file.write_bytes(file.read_bytes()[:-1] + b"?")

    found = commit.find_latest(tmp_path / "run")

    assert found.folder == older
    assert "000001.sealed" in found.skipped[0].reason
    assert commit.prune(tmp_path / "run", keep_last=1) == [older]  # by sizes, as plain ones
    with pytest.raises(SealedError, match="no key was given"):
        open_checkpoint(newer)


@pytest.mark.parametrize("failure", [Killed, refused])
def test_a_save_that_breaks_anywhere_leaves_the_one_before(
    tmp_path: Path, key: tuple[str, KeySource], failure: type[BaseException]
) -> None:
    for at in count():
        root = tmp_path / str(at)
        save(root, key[0], step=1)
        disk = BreakingDisk(at=at, make=failure)
        try:
            save(root, key[0], step=2, operations=disk)
        except (Killed, OSError):
            pass
        else:
            break
        newest = commit.find_latest(root).folder
        assert newest is not None
        opened = open_checkpoint(newest, key=key[1])
        assert opened.step in (1, 2)
        assert np.array_equal(opened.tensors["w"].numpy(), weights_of(opened.step)["w"])
    assert at > 25


def test_what_was_promised_must_be_written(tmp_path: Path, key: tuple[str, KeySource]) -> None:
    disk = SealingOperations(SealedSave(recipients=[key[0]]).place("w"))

    with disk.create_sized(tmp_path / "w", 5) as file:
        disk.write(file, memoryview(b"ab"))
        with pytest.raises(ValueError, match="3 bytes were promised"):
            disk.sync(file)
    with pytest.raises(ValueError, match="size must be known"):
        disk.create(tmp_path / "w")
