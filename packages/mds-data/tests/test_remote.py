"""Stores behind zarr's store interface give what local ones give, also when the network is bad."""

from __future__ import annotations

import asyncio
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from store_material import random_documents, write_small
from zarr.storage import LocalStore, MemoryStore, WrapperStore

from mds_data import DamagedError, GPTDataset, StoreError, open_store
from mds_data.cli import main
from mds_data.store.append import append_documents
from mds_data.store.merge import merge_stores
from mds_data.store.remote import RemoteOptions, open_remote_store
from mds_data.store.remote_files import RemoteError, RetryPolicy
from mds_data.store.verify import verify_remote_store

FAST = RetryPolicy(attempts=4, first_wait=0.0, timeout=20)
DOCUMENTS = random_documents(40, seed=4, longest=120)


class Unreliable(WrapperStore):
    """Counts requests; each file's first ones fail or never end."""

    def __init__(self, store, *, failing: int = 0, hanging: int = 0, error=ConnectionError) -> None:
        super().__init__(store)
        self.failing, self.hanging, self.error = failing, hanging, error
        self.asked: list[tuple[str, object]] = []

    async def get(self, key, prototype, byte_range=None):
        self.asked.append((key, byte_range))
        tries = sum(each == (key, byte_range) for each in self.asked)
        if tries <= self.hanging:
            await asyncio.sleep(60)
        if tries <= self.failing:
            raise self.error(f"try {tries} failed")
        return await super().get(key, prototype, byte_range)


@pytest.fixture(params=["hot", "archive"])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    write_small(tmp_path / "s", DOCUMENTS, layout=request.param)
    return tmp_path / "s"


def remote(path: Path, **options):
    settings = {"retries": FAST, **options}
    place = LocalStore(path, read_only=True)
    return open_remote_store(place, options=RemoteOptions(**settings))


def test_documents_and_tokens_are_those_of_the_local_store(path: Path) -> None:
    local, far = open_store(path), remote(path)

    assert len(far) == len(local)
    for number, document in enumerate(DOCUMENTS):
        np.testing.assert_array_equal(far[number], document)
    chance = np.random.default_rng(1)
    for _ in range(200):
        start, stop = sorted(chance.integers(0, local.num_positions + 1, 2).tolist())
        found = far.tokens(start, stop)
        np.testing.assert_array_equal(found, local.tokens(start, stop))
        assert not found.flags.writeable
    with pytest.raises(IndexError):
        far.tokens(0, local.num_positions + 1)
    far.close()
    with pytest.raises(StoreError, match="was closed"):
        far.tokens(0, 1)


def test_datasets_and_merged_stores_work_alike(path: Path, tmp_path: Path) -> None:
    merge_stores([path, path], tmp_path / "merged")

    near, far = (
        GPTDataset(store, seq_length=50)
        for store in (open_store(tmp_path / "merged"), remote(tmp_path / "merged"))
    )

    assert len(near) == len(far)
    for number in range(len(near)):
        np.testing.assert_array_equal(near.window(number), far.window(number))


def test_any_zarr_store_will_do(path: Path) -> None:
    from zarr.core.buffer import cpu

    memory = MemoryStore(
        {
            file.relative_to(path).as_posix(): cpu.Buffer.from_bytes(file.read_bytes())
            for file in path.rglob("*")
            if file.is_file()
        }
    )

    store = open_remote_store(memory)

    np.testing.assert_array_equal(store[3], DOCUMENTS[3])
    with pytest.raises(StoreError, match="open it by its URL"):
        pickle.dumps(store)


def test_a_url_is_opened_by_open_store_and_can_be_sent(path: Path) -> None:
    pytest.importorskip("fsspec")

    store = open_store(f"file://{path}")
    again = pickle.loads(pickle.dumps(store))

    np.testing.assert_array_equal(again[5], DOCUMENTS[5])
    assert "file://" in repr(store)


@pytest.mark.parametrize("error", [ConnectionError, TimeoutError, OSError, EOFError])
def test_failing_requests_are_tried_again(path: Path, error: type[Exception]) -> None:
    place = Unreliable(LocalStore(path, read_only=True), failing=3, error=error)

    store = open_remote_store(place, options=RemoteOptions(retries=FAST))

    for number, document in enumerate(DOCUMENTS):
        np.testing.assert_array_equal(store[number], document)


def test_a_request_without_an_answer_is_tried_again(path: Path) -> None:
    place = Unreliable(LocalStore(path, read_only=True), hanging=1)
    policy = RetryPolicy(attempts=20, first_wait=0, timeout=0.2)

    store = open_remote_store(place, options=RemoteOptions(retries=policy))

    np.testing.assert_array_equal(store[3], DOCUMENTS[3])


def test_after_all_tries_the_file_and_the_reason_are_named(path: Path) -> None:
    place = Unreliable(LocalStore(path, read_only=True), failing=9)

    with pytest.raises(RemoteError, match=r"manifest\.json: can't be read after 4 tries \(try 4"):
        open_remote_store(place, options=RemoteOptions(retries=FAST))


def test_no_permission_is_not_tried_again(path: Path) -> None:
    place = Unreliable(LocalStore(path, read_only=True), failing=9, error=PermissionError)

    with pytest.raises(PermissionError):
        open_remote_store(place, options=RemoteOptions(retries=FAST))
    assert len(place.asked) == 1


def test_reading_forward_fetches_ahead_in_few_requests(path: Path) -> None:
    place = Unreliable(LocalStore(path, read_only=True))
    store = open_remote_store(place, options=RemoteOptions(retries=FAST, read_ahead=8))
    before = len(place.asked)

    for start in range(0, store.num_positions - 32, 32):
        store.tokens(start, start + 32)

    chunks = -(-store.num_positions // 64)
    assert len(place.asked) - before < chunks
    random = Unreliable(LocalStore(path, read_only=True))
    store = open_remote_store(random, options=RemoteOptions(retries=FAST, read_ahead=8))
    before = len(random.asked)
    store.tokens(1000, 1010)
    assert len(random.asked) - before == 2  # the index of the shard and one chunk


def test_memory_stays_within_its_bounds(path: Path) -> None:
    store = remote(path, memory_bytes=400, read_ahead=2)

    for document, expected in zip(store, DOCUMENTS, strict=True):
        np.testing.assert_array_equal(document, expected)

    assert len(store.parts[0].tokens._chunks) <= max(2, 400 // 132)


def test_the_cache_saves_requests_and_is_checked(path: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for _ in range(2):
        place = Unreliable(LocalStore(path, read_only=True))
        store = open_remote_store(place, options=RemoteOptions(retries=FAST, cache=cache))
        for number, document in enumerate(DOCUMENTS):
            np.testing.assert_array_equal(store[number], document)
    shards = {key for key, _ in place.asked if "/c/" in key}
    assert shards == set()

    for file in cache.rglob("*"):
        if file.is_file():
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
    store = remote(path, cache=cache)
    for number, document in enumerate(DOCUMENTS):
        np.testing.assert_array_equal(store[number], document)


def test_the_cache_keeps_its_size_and_no_older_revision(path: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    store = remote(path, cache=cache, cache_bytes=2000)
    list(store)
    sizes = [file.stat().st_size for file in cache.rglob("*") if file.is_file()]
    assert 0 < sum(sizes) <= 2000 + 250 + max(sizes)
    append_documents(path, [[1, 2, 3]])

    again = remote(path, cache=cache)

    np.testing.assert_array_equal(again[-1], [1, 2, 3])
    assert len([folder for folder in cache.glob("*/*") if folder.is_dir()]) == 1


def test_a_copy_of_a_store_that_was_being_changed_is_read_right(path: Path) -> None:
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    append_documents(path, [[7, 8, 9]])
    for file in [file for file in path.rglob("*") if file.is_file()]:
        if file.name != "manifest.json" and before.get(file) != file.read_bytes():
            file.with_name(f"{file.name}.r2").write_bytes(file.read_bytes())
            if file in before:
                file.write_bytes(before[file])
            else:
                file.unlink()

    store = remote(path)

    np.testing.assert_array_equal(store[-1], [7, 8, 9])
    np.testing.assert_array_equal(store[3], DOCUMENTS[3])


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "foreign"])
def test_damage_is_an_error_and_never_zeros(path: Path, damage: str) -> None:
    shard = path / "tokens/c/1"
    data = bytearray(shard.read_bytes())
    if damage == "missing":
        shard.unlink()
    elif damage == "cut":
        shard.write_bytes(data[:-5])
    elif damage == "flipped":
        data[3] ^= 4
        shard.write_bytes(data)
    else:
        shard.write_bytes((path / "tokens/c/0").read_bytes()[: len(data) - 9])

    store = remote(path)

    with pytest.raises(DamagedError, match="tokens/c/1"):
        list(store)


def test_a_place_without_a_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such store"):
        remote(tmp_path)


def test_threads_and_forked_children_may_share_a_store(path: Path) -> None:
    store = remote(path, memory_bytes=600)
    with ThreadPoolExecutor(4) as pool:
        for number, found in enumerate(pool.map(store.__getitem__, list(range(40)) * 3)):
            np.testing.assert_array_equal(found, DOCUMENTS[number % 40])
    if not hasattr(os, "fork"):
        return
    store.tokens(0, 64)
    child = os.fork()
    if child == 0:
        good = all(np.array_equal(store[n], DOCUMENTS[n]) for n in range(40))
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("place", ["tokens/c/1", "doc_length/c/0", "zarr.json", "manifest.json"])
def test_verify_finds_flipped_bits_there_too(path: Path, place: str) -> None:
    assert verify_remote_store(LocalStore(path, read_only=True)).sound
    file = path / place
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 2
    file.write_bytes(data)

    report = verify_remote_store(LocalStore(path, read_only=True))

    assert len(report.problems) == 1
    assert place in report.problems[0]


def test_verify_takes_a_url(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fsspec")

    assert main(["verify", f"file://{path}"]) == 0
    assert "is sound" in capsys.readouterr().out
    (path / "tokens/c/0").unlink()
    assert main(["verify", f"file://{path}"]) == 1
    assert "tokens/c/0: is missing" in capsys.readouterr().out
