"""Flipped bits, cut, zeroed and swapped files in a checkpoint and in a store: all are found.

A hundred flips always; a thousand with the environment variable MDS_RELIABILITY=full.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mds_ckpt import commit
from mds_ckpt.formats.mds import merge_rank_files, write_rank_file
from mds_ckpt.manifest import CheckpointManifest, ModelRecord
from mds_ckpt.verification import verify
from mds_data import write_store
from mds_data.errors import DataError
from mds_data.store.verify import verify_store

FULL = os.environ.get("MDS_RELIABILITY") == "full"
FLIPS = 1000 if FULL else 100
CUTS = 64 if FULL else 8

pytestmark = pytest.mark.timeout(1200)


def write_checkpoint(root: Path, *, step: int) -> Path:
    """Two ranks' files with different numbers in every step."""
    chance = np.random.default_rng(step)
    partial = commit.stage(root, step)
    written = []
    for rank in range(2):
        array = chance.normal(size=(4, 5)).astype("<f4")
        box = ((4 * rank, 4 * rank + 4), (0, 5))
        written.append(write_rank_file(partial, rank, [("w", "weight", box, None, array)]))
    parameters, files = merge_rank_files({"w": (8, 5)}, written)
    manifest = CheckpointManifest(
        producer={"name": "mds-train", "version": "0"},  # whose manifests carry their digest
        step=step,
        counters={"iteration": step},
        model=ModelRecord(family="gpt", config={}, vocab_size=5, tied_embeddings=True),
        parameters=parameters,
        files=files,
    )
    return commit.publish(partial, manifest, root=root)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for step in (1, 2):
        write_checkpoint(root, step=step)
    return root


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    for number in (1, 2):
        chance = np.random.default_rng(number)
        documents = [chance.integers(0, 1000, 60) for _ in range(40)]
        write_store(folder / f"store-{number}", documents, vocab_size=1000, eod_id=0)
    return folder


def checkpoint_is_sound(folder: Path) -> bool:
    """As ``mds-ckpt verify`` and a resume with digests would say."""
    by_resume = not commit.find_latest(folder.parent, digests=True).skipped
    try:
        by_verify = not verify(folder).problems
    except ValueError:
        by_verify = False
    assert by_resume == by_verify
    return by_verify


def store_is_sound(folder: Path) -> bool:
    """As ``mds-data verify`` would say."""
    try:
        return not verify_store(folder).problems
    except DataError:
        return False


CASES = {
    "checkpoint": ("checkpoints", "step-2", "step-1", checkpoint_is_sound),
    "store": ("stores", "store-2", "store-1", store_is_sound),
}


class Ground:
    """A sound folder that is damaged and mended again and again."""

    def __init__(self, folder: Path, sound: object) -> None:
        self.folder, self._sound = folder, sound
        self.files = sorted(path for path in folder.rglob("*") if path.is_file())

    def sound(self) -> bool:
        return bool(self._sound(self.folder))  # type: ignore[operator]

    def finds(self, path: Path, data: bytes) -> bool:
        """Whether other content of a file is noticed."""
        whole = path.read_bytes()
        if data == whole:
            return True
        path.write_bytes(data)
        try:
            return not self.sound()
        finally:
            path.write_bytes(whole)


@pytest.fixture(params=CASES)
def ground(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Ground, Path]]:
    fixture, name, other, sound = CASES[request.param]
    made: Path = request.getfixturevalue(fixture)
    copy = tmp_path / "ground"
    copy.mkdir()
    shutil.copytree(made / name, copy / name)
    found = Ground(copy / name, sound)
    assert found.sound()
    yield found, made / other
    assert found.sound()


def test_every_flipped_bit_is_found(ground: tuple[Ground, Path]) -> None:
    place, _ = ground
    chance = random.Random(20261130)
    sizes = [path.stat().st_size for path in place.files]
    missed = []
    for _ in range(FLIPS):
        (path,) = chance.choices(place.files, weights=[size + 200 for size in sizes])
        data = bytearray(path.read_bytes())
        at, bit = chance.randrange(len(data)), chance.randrange(8)
        data[at] ^= 1 << bit
        if not place.finds(path, bytes(data)):
            missed.append((path.name, at, bit))
    assert missed == []


def test_every_cut_and_every_zeroed_tail_is_found(ground: tuple[Ground, Path]) -> None:
    place, _ = ground
    missed = []
    for path in place.files:
        data = path.read_bytes()
        for part in range(CUTS):
            keep = len(data) * part // CUTS
            tails = {"cut": data[:keep], "zeros": data[:keep] + bytes(len(data) - keep)}
            missed += [
                (path.name, what, part)
                for what, changed in tails.items()
                if not place.finds(path, changed)
            ]
    assert missed == []


def test_longer_files_and_missing_files_are_found(ground: tuple[Ground, Path]) -> None:
    place, _ = ground
    for path in place.files:
        data = path.read_bytes()
        assert place.finds(path, data + b"\0"), path.name
        path.unlink()
        try:
            assert not place.sound(), path.name
        except (FileNotFoundError, ValueError):
            pass
        finally:
            path.write_bytes(data)


def test_swapped_and_stale_files_are_found(ground: tuple[Ground, Path]) -> None:
    """Files of one folder exchanged, and a file of another step or store in place of its own."""
    place, other = ground
    for path in place.files:
        stale = other / path.relative_to(place.folder)
        if path.name not in {"manifest.json"} and stale.is_file():
            assert place.finds(path, stale.read_bytes()), path.name
    for one, two in zip(place.files, place.files[1:], strict=False):
        first, second = one.read_bytes(), two.read_bytes()
        if first == second:
            continue
        one.write_bytes(second)
        two.write_bytes(first)
        try:
            assert not place.sound(), (one.name, two.name)
        except (FileNotFoundError, ValueError):
            pass
        finally:
            one.write_bytes(first)
            two.write_bytes(second)
