import os
import pickle
import threading

import numpy as np
import pytest
from store_material import assert_holds, random_documents, write_small

from mds_data import DamagedError, StoreError, open_store
from mds_data.store.reader import ShardedArray


@pytest.fixture
def documents():
    return random_documents(80)


@pytest.fixture
def path(tmp_path, documents):
    write_small(tmp_path / "s", documents)
    return tmp_path / "s"


@pytest.fixture
def row(documents):
    return np.concatenate(documents)


def test_any_stretch_of_tokens_is_read(path, row):
    store = open_store(path)
    random = np.random.default_rng(1)
    for start, stop in np.sort(random.integers(0, len(row) + 1, (500, 2)), axis=1):
        np.testing.assert_array_equal(store.tokens(int(start), int(stop)), row[start:stop])


@pytest.mark.parametrize("bounds", [(-1, 2), (5, 3), (0, 10**9), (10**9, 10**9 + 1), (-64, 0)])
def test_a_stretch_outside_is_an_error(path, bounds):
    with pytest.raises(IndexError, match="can't read"):
        open_store(path).tokens(*bounds)


def test_a_read_inside_a_chunk_is_a_read_only_view(path):
    store = open_store(path)

    first, second = store.tokens(10, 20), store.tokens(12, 22)

    assert np.shares_memory(first, second)
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1


@pytest.mark.parametrize("layout", ["hot", "archive"])
def test_views_outlive_the_store(tmp_path, documents, row, layout):
    write_small(tmp_path / "t", documents, layout=layout)
    store = open_store(tmp_path / "t")
    view = store.tokens(3, 30)

    store.close()

    np.testing.assert_array_equal(view, row[3:30])
    with pytest.raises(StoreError, match="was closed"):
        store.tokens(3, 30)


@pytest.mark.parametrize("layout", ["hot", "archive"])
def test_a_flipped_bit_is_an_error_that_names_shard_and_chunk(tmp_path, documents, layout):
    path = tmp_path / "t"
    write_small(path, documents, layout=layout)
    shard = path / "tokens/c/1"
    data = bytearray(shard.read_bytes())
    data[20] ^= 16
    shard.write_bytes(data)
    store = open_store(path)

    store.tokens(0, 256)  # another shard is well

    with pytest.raises(DamagedError, match="tokens/c/1 chunk 0: the checksum differs"):
        store.tokens(256, 260)


def test_a_checksum_is_compared_only_at_the_first_touch(path, row):
    store = open_store(path)
    store.tokens(0, 4)
    with (path / "tokens/c/0").open("r+b") as file:
        file.seek(100)
        file.write(b"\xff\xff")

    assert store.tokens(0, 4).tolist() == row[:4].tolist()
    with pytest.raises(DamagedError, match="checksum differs"):
        open_store(path).tokens(0, 4)


def test_a_missing_shard_is_an_error_at_opening(path):
    (path / "tokens/c/2").unlink()
    with pytest.raises(DamagedError, match=r"tokens/c/2: is missing.*restore"):
        open_store(path)


def test_a_truncated_shard_is_an_error_at_opening(path):
    os.truncate(path / "tokens/c/2", 100)
    with pytest.raises(DamagedError, match="tokens/c/2: has 100 bytes, and the manifest says"):
        open_store(path)


def test_a_shard_that_shrinks_after_opening_is_an_error(path):
    store = open_store(path)
    os.truncate(path / "tokens/c/2", 100)
    with pytest.raises(DamagedError, match="changed its size since the store was opened"):
        store.tokens(2 * 256, 2 * 256 + 5)


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="no links here")
@pytest.mark.parametrize("name", ["tokens/c/2", "tokens/zarr.json", "tokens"])
def test_links_are_refused(path, tmp_path, name):
    (path / name).rename(tmp_path / "outside")
    (path / name).symlink_to(tmp_path / "outside")
    with pytest.raises(DamagedError, match="plain files only"):
        open_store(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
@pytest.mark.parametrize("name", ["tokens/c/2", "manifest.json"])
@pytest.mark.timeout(10)
def test_a_pipe_does_not_hang_the_reader(path, name):
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(DamagedError, match="plain file"):
        open_store(path)


def test_threads_may_share_a_store(path, row):
    store = open_store(path)
    wrong = []

    def read(seed):
        random = np.random.default_rng(seed)
        wrong.extend(
            start
            for start in random.integers(0, len(row) - 150, 300).tolist()
            if (store.tokens(start, start + 150) != row[start : start + 150]).any()
        )

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_workers_may_share_a_store(path, row):
    store = open_store(path)
    store.tokens(0, 10)
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            right = all(
                (store.tokens(start, start + 90) == row[start : start + 90]).all()
                for start in range(0, len(row) - 90, 50)
            )
            os._exit(0 if right else 1)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0, 0, 0]


def test_a_store_can_be_sent_to_a_worker(path, documents):
    assert_holds(pickle.loads(pickle.dumps(open_store(path))), documents)


def test_a_store_that_was_replaced_is_not_sent(path, documents):
    data = pickle.dumps(open_store(path))
    path.rename(path.with_name("old"))
    write_small(path, documents)
    with pytest.raises(StoreError, match="was replaced or changed"):
        pickle.loads(data)


def test_few_open_files_are_enough_for_many_shards(path, row, monkeypatch):
    monkeypatch.setattr("mds_data.store.reader._most_maps", lambda: 2)
    store = open_store(path)
    for _ in range(2):
        np.testing.assert_array_equal(
            np.concatenate([store.tokens(at, at + 100) for at in range(0, len(row) - 100, 100)]),
            row[: (len(row) - 1) // 100 * 100],
        )


def test_shards_whose_chunks_lie_elsewhere_are_read_by_their_index(path, row):
    """Another Zarr writer may leave room between chunks; the index says where they are."""
    store = open_store(path)
    part = store.parts[0]
    name = "tokens/c/0"
    data = (path / name).read_bytes()
    index = np.frombuffer(data[-68:-4], "<u8").reshape(4, 2).copy()
    index[2:, 0] += 10
    from mds_data.store.shard import encode_index

    moved = data[: 2 * 132] + b"\0" * 10 + data[2 * 132 : 4 * 132] + encode_index(index)
    (path / name).write_bytes(moved)
    record = part.manifest.files[name]
    part.manifest.files[name] = type(record)(size=len(moved), sha256=record.sha256)

    array = ShardedArray(part.folder, "tokens")

    np.testing.assert_array_equal(array.read(0, 256), row[:256])
