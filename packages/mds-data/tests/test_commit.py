"""Kill the writer at every file operation: what is left is the old or the new state."""

import os
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from store_material import RefusedAt, assert_holds, random_documents, run_killed, write_small

from mds_data import DataError, open_store
from mds_data.store.append import StoreAppender
from mds_data.store.commit import FileOperations
from mds_data.store.erase import erase_documents
from mds_data.store.merge import merge_stores
from mds_data.store.verify import verify_store
from mds_data.store.writer import StoreWriter

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
OLD = random_documents(6, seed=1, longest=90)
ADDED = random_documents(2, seed=2, longest=90)
ERASED = (1, 4)


def append_to(path, operations):
    with StoreAppender(path, operations=operations) as appender:
        for document in ADDED:
            appender.add(document)
        appender.commit()


def after_erasure():
    return [[] if number in ERASED else document for number, document in enumerate(OLD)]


def sweep(start, action, judge, *, torn=False):
    """Kill ``action`` at its operation 1, 2, ... until it survives; judge every state left."""
    last = 0
    died = True
    while died:
        last += 1
        path = start(last)
        died = run_killed(lambda operations: action(path, operations), last, torn=torn)  # noqa: B023
        judge(path, died)
    assert last > 15
    return last


@needs_fork
def test_a_killed_writer_leaves_no_store_or_the_whole_one(tmp_path):
    def judge(path, died):
        if not path.exists():
            with pytest.raises(FileNotFoundError):
                open_store(path)
            assert died
            write_small(path, OLD)  # what the dead writer left is no obstacle
        assert_holds(open_store(path), OLD)
        report = verify_store(path)
        assert (report.problems, report.notes) == ((), ())
        assert not list(path.parent.glob("s.partial-*"))
        shutil.rmtree(path.parent)

    def start(number):
        folder = tmp_path / str(number)
        folder.mkdir()
        return folder / "s"

    def action(path, operations):
        write_small(path, OLD, operations=operations)

    sweep(start, action, judge, torn=True)


def copied(tmp_path):
    origin = tmp_path / "origin/s"
    origin.parent.mkdir()
    write_small(origin, OLD)

    def start(number):
        folder = tmp_path / str(number)
        shutil.copytree(origin.parent, folder)
        return folder / "s"

    return start


@needs_fork
def test_a_killed_append_leaves_the_old_or_the_new_store(tmp_path):
    seen = set()

    def judge(path, died):
        store = open_store(path)
        state = {len(OLD): "old", len(OLD) + len(ADDED): "new"}[len(store)]
        assert_holds(store, OLD if state == "old" else OLD + ADDED)
        seen.add(state)
        assert died or state == "new"
        append_to(path, FileOperations())  # settles what was left, and goes on
        assert_holds(open_store(path), OLD + ADDED * (1 if state == "old" else 2))
        report = verify_store(path)
        assert (report.problems, report.notes) == ((), ())
        shutil.rmtree(path.parent)

    sweep(copied(tmp_path), append_to, judge, torn=True)
    assert seen == {"old", "new"}


@needs_fork
def test_a_killed_erasure_leaves_the_old_or_the_new_store(tmp_path):
    seen = set()

    def judge(path, died):
        store = open_store(path)
        state = "old" if len(store[1]) else "new"
        assert_holds(store, OLD if state == "old" else after_erasure())
        seen.add(state)
        erase_documents(path, ERASED, reason="again")
        assert_holds(open_store(path), after_erasure())
        report = verify_store(path)
        assert (report.problems, report.notes) == ((), ())
        assert no_trace(path, OLD[1])
        shutil.rmtree(path.parent)

    def action(path, operations):
        erase_documents(path, ERASED, reason="asked", operations=operations)

    sweep(copied(tmp_path), action, judge)
    assert seen == {"old", "new"}


def no_trace(path, document):
    needle = document[:8].tobytes()
    return not any(needle in file.read_bytes() for file in path.rglob("*") if file.is_file())


@needs_fork
def test_a_killed_merge_leaves_no_store_or_the_whole_one(tmp_path):
    source = tmp_path / "s"
    write_small(source, OLD)

    def judge(path, died):
        if not path.exists():
            assert died
            merge_stores([source], path)
        report = verify_store(path)
        assert (report.problems, report.notes) == ((), ())
        assert_holds(open_store(path), OLD)
        shutil.rmtree(path)

    def action(path, operations):
        merge_stores([source], path, operations=operations)

    sweep(lambda number: tmp_path / "m", action, judge)
    assert_holds(open_store(source), OLD)
    assert sorted(tmp_path.iterdir()) == [source]


class Recorded(FileOperations):
    """Writes down what is done, in order."""

    def __init__(self):
        self.log = []
        self.names = {}

    def create(self, path):
        handle = super().create(path)
        self.names[handle] = path
        self.log.append(("create", path))
        return handle

    def write(self, handle, data):
        self.log.append(("write", self.names[handle]))
        super().write(handle, data)

    def sync(self, handle):
        self.log.append(("sync", self.names[handle]))
        super().sync(handle)

    def sync_folder(self, path):
        self.log.append(("sync", path))
        super().sync_folder(path)

    def make_folder(self, path):
        self.log.append(("create", path))
        super().make_folder(path)

    def rename(self, source, target):
        self.log.append(("rename", source, target))
        super().rename(source, target)


def assert_durable(log, commit, *, root):
    """Before the renaming that commits, every file is synced after its last write, every folder
    after its last new name; after it the folder that holds the new name is synced."""
    renames = [place for place, entry in enumerate(log) if entry[0] == "rename" and commit(entry)]
    moment = renames[0]
    needs = {}
    for entry in log[:moment]:
        if entry[0] in ("create", "write"):
            needs[entry[1]] = True
            if entry[0] == "create" and entry[1] != root:
                needs[entry[1].parent] = True
        elif entry[0] == "sync":
            needs[entry[1]] = False
    assert [path for path, unsynced in needs.items() if unsynced] == []
    assert ("sync", log[moment][2].parent) in log[moment:]


def test_nothing_is_published_before_it_is_durable(tmp_path):
    operations = Recorded()
    write_small(tmp_path / "s", OLD, operations=operations)

    partial = operations.log[0][1]
    assert_durable(operations.log, lambda entry: entry[2] == tmp_path / "s", root=partial)


def test_new_folders_above_a_store_are_durable_before_it_is_published(tmp_path):
    operations, path = Recorded(), tmp_path / "new" / "deep" / "s"
    write_small(path, OLD, operations=operations)

    new, deep = path.parent.parent, path.parent
    assert operations.log[:4] == [
        *(("create", new), ("sync", tmp_path)),
        *(("create", deep), ("sync", new)),
    ]


def mutants(tmp_path, kind, *, append):
    """Whether the loss of each operation of a kind shows, in order."""
    found = []
    while True:
        number = len(found) + 1
        path = tmp_path / f"{kind}-{number}"
        if append:
            write_small(path, OLD)
        operations = Forgetful(kind, number)
        caught = False
        try:
            if append:
                append_to(path, operations)
            else:
                write_small(path, OLD, operations=operations)
            target = path / "manifest.json" if append else path
            root = Path("/none") if append else operations.log[0][1]
            assert_durable(operations.log, lambda entry, to=target: entry[2] == to, root=root)
        except (AssertionError, IndexError, OSError, DataError):
            caught = True
        if operations.left > 0:
            assert not caught, "nothing was forgotten"
            return found
        if not caught:  # it only tidies up behind the commit: what was written is there without it
            assert verify_store(path).problems == ()
            assert len(open_store(path)) > len(OLD)
        found.append(caught)


class Forgetful(Recorded):
    """Leaves out one operation, as code would that had forgotten it."""

    def __init__(self, kind, number):
        super().__init__()
        self.kind, self.left = kind, number

    def _forgets(self, kind):
        self.left -= kind == self.kind
        return kind == self.kind and self.left == 0

    def sync(self, handle):
        if not self._forgets("sync"):
            super().sync(handle)

    def sync_folder(self, path):
        if not self._forgets("sync_folder"):
            super().sync_folder(path)

    def rename(self, source, target):
        if not self._forgets("rename"):
            super().rename(source, target)


@pytest.mark.parametrize("kind", ["sync", "sync_folder", "rename"])
@pytest.mark.parametrize("append", [False, True])
def test_every_sync_and_every_rename_is_needed(tmp_path, kind, append):
    """The tests beside this one fail without any single one of them; an append also moves files to
    their places behind its commit, and readers find them where they wait."""
    found = mutants(tmp_path, kind, append=append)

    assert found[0]
    assert all(found) or (append and found == sorted(found, reverse=True))


def test_no_revision_is_put_in_force_before_it_is_durable(tmp_path):
    write_small(tmp_path / "s", OLD)
    operations = Recorded()
    append_to(tmp_path / "s", operations)

    manifest = tmp_path / "s/manifest.json"
    assert_durable(operations.log, lambda entry: entry[2] == manifest, root=Path("/none"))


def test_no_checkpoint_is_in_force_before_it_is_durable(tmp_path):
    operations = Recorded()
    settings = {"vocab_size": 1000, "chunk_tokens": 64, "chunks_per_shard": 4}
    with StoreWriter(tmp_path / "s", operations=operations, **settings) as writer:
        for document in OLD:
            writer.add(document)
        writer.checkpoint({})
        partial = operations.log[0][1]

        def commit(entry):
            return entry[2] == partial / "resume.json"

        assert_durable(operations.log, commit, root=partial)
        assert ("sync", tmp_path) in operations.log


@pytest.mark.parametrize("failing", ["create", "write", "sync", "rename", "sync_folder"])
def test_a_failing_disk_leaves_the_old_state_and_no_litter(tmp_path, failing):
    class Full(FileOperations):
        pass

    def fail(self, *arguments):
        raise OSError(28, "No space left on device")

    setattr(Full, failing, fail)
    with pytest.raises(OSError, match="No space left"):
        write_small(tmp_path / "new", OLD, operations=Full())
    assert list(tmp_path.iterdir()) == []

    write_small(tmp_path / "s", OLD)
    with pytest.raises(OSError, match="No space left"):
        append_to(tmp_path / "s", Full())
    assert_holds(open_store(tmp_path / "s"), OLD)
    assert verify_store(tmp_path / "s").notes == ()


def refusals(tmp_path, act, *, start):
    """Let ``act`` fail at its operation 1, 2, ... until it succeeds; yields each folder left."""
    for last in count(1):
        path = start(tmp_path / str(last))
        try:
            act(path, RefusedAt(last, torn=True))
        except OSError:
            yield path, True
        else:
            yield path, False
            assert last > 15
            return


def test_a_writer_that_is_refused_at_any_operation_leaves_no_store_or_the_whole_one(tmp_path):
    def start(folder):
        folder.mkdir()
        return folder / "s"

    def act(path, operations):
        write_small(path, OLD, operations=operations)

    for path, refused in refusals(tmp_path, act, start=start):
        assert not list(path.parent.glob("s.partial-*"))
        if path.exists():
            assert_holds(open_store(path), OLD)
        else:
            assert refused
            write_small(path, OLD)


def test_an_append_that_is_refused_at_any_operation_leaves_the_old_or_the_new_store(tmp_path):
    write_small(tmp_path / "origin/s", OLD)

    def start(folder):
        shutil.copytree(tmp_path / "origin", folder)
        return folder / "s"

    for path, refused in refusals(tmp_path, append_to, start=start):
        store = open_store(path)
        old = len(store) == len(OLD)
        assert refused or not old
        assert_holds(store, OLD if old else OLD + ADDED)
        assert verify_store(path).problems == ()


def test_writes_that_end_early_are_continued(tmp_path, monkeypatch):
    whole = os.write
    calls = []

    def early(handle, data):
        calls.append(len(data))
        return whole(handle, memoryview(data)[: max(1, len(data) // 3)])

    write_small(tmp_path / "s", OLD)
    monkeypatch.setattr(os, "write", early)
    append_to(tmp_path / "s", FileOperations())
    erase_documents(tmp_path / "s", ERASED, reason="asked")

    assert len(calls) > 20
    assert_holds(open_store(tmp_path / "s"), after_erasure() + ADDED)
    assert verify_store(tmp_path / "s").problems == ()


def test_a_disk_that_takes_less_than_it_says_is_noticed(tmp_path, monkeypatch):
    whole = os.write
    write_small(tmp_path / "s", OLD)
    monkeypatch.setattr(os, "write", lambda handle, data: whole(handle, data[1:]) + 1)

    with pytest.raises(OSError, match="took less than it said"):
        append_to(tmp_path / "s", FileOperations())

    assert_holds(open_store(tmp_path / "s"), OLD)


@pytest.mark.parametrize("survived", range(1, 12))
def test_an_error_at_any_synchronisation_leaves_the_old_or_the_new_state(tmp_path, survived):
    class Failing(FileOperations):
        calls = 0

        def sync_folder(self, path):
            self.calls += 1
            if self.calls == survived:
                raise OSError(5, "Input/output error")

    write_small(tmp_path / "s", OLD)
    with suppress(OSError):
        append_to(tmp_path / "s", Failing())

    store = open_store(tmp_path / "s")
    assert_holds(store, OLD if len(store) == len(OLD) else OLD + ADDED)
    assert verify_store(tmp_path / "s").problems == ()


def test_an_unfinished_folder_is_no_store(tmp_path):
    (tmp_path / "s/tokens").mkdir(parents=True)
    with pytest.raises(DataError, match="never finished"):
        open_store(tmp_path / "s")
