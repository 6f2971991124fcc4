"""Documents and stores that many tests use, and the places of golden data."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from mds_data.store.commit import FileOperations
from mds_data.store.writer import StoreWriter

VOCAB_SIZE = 1000


def random_documents(count, *, seed=0, longest=400):
    """Documents of 0 to ``longest`` tokens."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, longest, count)
    return [random.integers(0, VOCAB_SIZE, length).astype(np.uint16) for length in lengths]


def write_small(path, documents, *, operations=None, **options):
    """A store with tiny chunks and shards, so that few documents cross many borders."""
    settings = {"vocab_size": VOCAB_SIZE, "chunk_tokens": 64, "chunks_per_shard": 4, **options}
    with StoreWriter(path, operations=operations, **settings) as writer:
        for document in documents:
            writer.add(document)
        return writer.commit()


def assert_holds(store, documents):
    assert len(store) == len(documents)
    for number, document in enumerate(documents):
        np.testing.assert_array_equal(store[number], document)


class KilledAt(FileOperations):
    """Ends the process before its operation number ``last``, or halfway through a write."""

    def __init__(self, last, *, torn=False):
        self.last, self.torn, self.count = last, torn, 0

    def _step(self):
        self.count += 1
        if self.count == self.last:
            os._exit(9)

    def write(self, handle, data):
        if self.torn and self.count + 1 == self.last:
            os.write(handle, data[: len(data) // 2])
        self._step()
        super().write(handle, data)


class RefusedAt(KilledAt):
    """Fails at its operation number ``last``, for another reason at each."""

    def _step(self):
        self.count += 1
        if self.count == self.last:
            number = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)[self.last % 4]
            raise OSError(number, os.strerror(number))


def _counted(name):
    def operation(self, *arguments):
        self._step()
        return getattr(FileOperations, name)(self, *arguments)

    return operation


for _name in (
    "create",
    "reopen",
    "sync",
    "sync_folder",
    "make_folder",
    "rename",
    "remove",
    "link",
    "overwrite",
):
    setattr(KilledAt, _name, _counted(_name))


def run_killed(action, last, *, torn=False):
    """Run ``action(operations)`` in a child that dies at operation ``last``; whether it died."""
    child = os.fork()
    if child == 0:
        try:
            action(KilledAt(last, torn=torn))
        except BaseException:  # noqa: BLE001 - a forked child must not come back into pytest
            os._exit(7)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9), f"the child failed with {code} at operation {last}"
    return code == 9


def _shared(variable, name):
    if variable in os.environ:
        return Path(os.environ[variable])
    for folder in Path(__file__).resolve().parents:
        found = folder.parent / "shared" / name
        if found.is_dir():
            return found
    return Path(name)


def golden_datasets():
    folder = _shared("MDS_GOLDEN_DIR", "fixtures") / "datasets"
    if not folder.is_dir():
        pytest.skip(f"golden datasets are not here: {folder} (set MDS_GOLDEN_DIR)")
    return folder


def case_folder(name):
    folder = _shared("MDS_CASES_DIR", "cases") / name
    if not folder.is_dir():
        pytest.skip(f"the case is not here: {folder} (set MDS_CASES_DIR)")
    return folder
