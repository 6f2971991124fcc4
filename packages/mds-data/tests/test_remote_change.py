"""Stores behind a network are changed as local ones are, and a writer that dies changes nothing."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from store_material import assert_holds, random_documents, write_small
from zarr.storage import LocalStore, WrapperStore

from mds_data import DamagedError, StoreError, open_store
from mds_data.cli import main
from mds_data.store.append import StoreAppender, append_documents
from mds_data.store.download import download_store
from mds_data.store.erase import erase_documents
from mds_data.store.join import join_stores
from mds_data.store.merge import merge_stores
from mds_data.store.remote import RemoteOptions, open_remote_store
from mds_data.store.remote_files import RetryPolicy
from mds_data.store.repack import repack_store
from mds_data.store.verify import verify_remote_store, verify_store

DOCUMENTS = random_documents(40, seed=4, longest=120)
MORE = random_documents(9, seed=5, longest=200)
OPTIONS = RemoteOptions(retries=RetryPolicy(attempts=2, first_wait=0.0, timeout=20))


class Dying(WrapperStore):
    """Lets so many changes through, then refuses all: what a killed writer leaves."""

    def __init__(self, store, *, last: int | None = None, never: str | None = None) -> None:
        super().__init__(store)
        self.last, self.never = last, never
        self.done: list[str] = []

    def _count(self, what: str) -> None:
        is_late = self.last is not None and len(self.done) >= self.last
        if is_late or what == self.never:
            raise PermissionError("the key was revoked")
        self.done.append(what)

    async def set(self, key, value):
        self._count(f"put {key}")
        await super().set(key, value)

    async def set_if_not_exists(self, key, value):
        self._count(f"claim {key}")
        await super().set_if_not_exists(key, value)

    async def delete(self, key):
        self._count(f"remove {key}")
        await super().delete(key)


@pytest.fixture(params=["hot", "archive"])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    write_small(tmp_path / "s", DOCUMENTS, layout=request.param)
    return tmp_path / "s"


def files(folder: Path) -> dict[str, bytes]:
    return {
        each.relative_to(folder).as_posix(): each.read_bytes()
        for each in folder.rglob("*")
        if each.is_file()
    }


def held(folder: Path) -> list[list[int]]:
    return [document.tolist() for document in open_store(folder)]


def url_of(folder: Path) -> str:
    return folder.as_uri()


def test_an_append_there_gives_the_files_of_one_here(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "far")
    append_documents(path, MORE)

    place = Dying(LocalStore(tmp_path / "far"))
    append_documents(place, MORE, options=OPTIONS)
    append_documents(path, DOCUMENTS)
    append_documents(LocalStore(tmp_path / "far"), DOCUMENTS, options=OPTIONS)

    assert files(tmp_path / "far") == files(path)
    committed = place.done.index("put manifest.json")
    before, after = place.done[:committed], place.done[committed + 1 :]
    assert before[0] == "claim change.json"
    assert all(each.endswith(".r2") for each in before[1:])  # nothing in force is touched
    assert after[-1] == "remove change.json"


def test_an_erasure_there_overwrites_the_bytes(path: Path, tmp_path: Path) -> None:
    longest = max(range(len(DOCUMENTS)), key=lambda number: len(DOCUMENTS[number]))
    shutil.copytree(path, tmp_path / "far")
    erase_documents(path, [3, longest], reason="asked for")

    far = LocalStore(tmp_path / "far")
    report = erase_documents(far, [longest, 3], reason="asked for", options=OPTIONS)

    assert report.documents == tuple(sorted({3, longest}))
    assert report.linked_files == ()
    here, there = files(path), files(tmp_path / "far")
    assert here.pop("manifest.json") != b"" != there.pop("manifest.json")  # the time may differ
    assert there == here
    if open_store(path).manifest.layout == "hot":
        needle = DOCUMENTS[longest][:20].tobytes()
        assert not any(needle in data for data in there.values())
    assert erase_documents(far, [3], reason="again", options=OPTIONS).documents == ()


@pytest.mark.parametrize("change", ["append", "erase"])
def test_a_writer_that_dies_anywhere_leaves_the_old_state_or_the_new(
    tmp_path: Path, change: str
) -> None:
    write_small(tmp_path / "s", DOCUMENTS[:8], chunks_per_shard=8)
    append_documents(tmp_path / "s", DOCUMENTS[8:10])

    def do(place: object) -> None:
        if change == "append":
            append_documents(place, MORE[:3], options=OPTIONS)
        else:
            erase_documents(place, [1], reason="asked for", options=OPTIONS)

    old = held(tmp_path / "s")
    shutil.copytree(tmp_path / "s", tmp_path / "new")
    whole = Dying(LocalStore(tmp_path / "new"))
    do(whole)
    new = held(tmp_path / "new")
    committed = whole.done.index("put manifest.json")
    for last in range(len(whole.done)):
        target = tmp_path / str(last)
        shutil.copytree(tmp_path / "s", target)
        with suppress(PermissionError):  # what only cleans up may be refused
            do(Dying(LocalStore(target), last=last))

        assert held(target) == (new if last > committed else old)
        (target / "change.json").unlink(missing_ok=True)
        if last <= committed:
            do(LocalStore(target))
        else:
            with StoreAppender(LocalStore(target), options=OPTIONS):
                pass
        assert files(target).keys() == files(tmp_path / "new").keys()
        assert held(target) == new
        assert verify_store(target).sound


def test_the_manifest_waits_for_every_file(path: Path) -> None:
    old = files(path)
    place = Dying(LocalStore(path), never="put doc_length/c/0.r2")

    with pytest.raises(PermissionError, match="access denied"):
        append_documents(place, MORE, options=OPTIONS)

    assert "put manifest.json" not in place.done
    assert files(path) == old  # what had been sent is gone, and so is the claim


def test_a_reader_goes_on_while_new_files_get_their_own_names(path: Path, tmp_path: Path) -> None:
    place = Dying(LocalStore(path))
    append_documents(place, MORE, options=OPTIONS)
    committed = place.done.index("put manifest.json")
    shutil.rmtree(path)
    write_small(path, DOCUMENTS)
    with pytest.raises(PermissionError):
        append_documents(Dying(LocalStore(path), last=committed + 1), MORE, options=OPTIONS)
    reader = open_remote_store(LocalStore(path), options=OPTIONS)
    assert len(reader) == len(DOCUMENTS) + len(MORE)
    np.testing.assert_array_equal(reader[-1], MORE[-1])

    (path / "change.json").unlink()
    with StoreAppender(LocalStore(path), options=OPTIONS):
        pass

    assert not [name for name in files(path) if name.endswith(".r2")]
    for number, document in enumerate([*DOCUMENTS, *MORE]):
        np.testing.assert_array_equal(reader[number], document)


def test_what_a_killed_writer_left_does_not_mix_with_the_next_change(tmp_path: Path) -> None:
    path = tmp_path / "s"
    write_small(path, DOCUMENTS)
    with pytest.raises(PermissionError):  # an erasure that never came into force
        erase_documents(Dying(LocalStore(path), last=4), [0, 1, 2], reason="x", options=OPTIONS)
    assert [name for name in files(path) if name.endswith(".r2")]
    with pytest.raises(StoreError, match="another writer changes it, or was killed"):
        append_documents(LocalStore(path), MORE, options=OPTIONS)
    (path / "change.json").unlink()

    append_documents(LocalStore(path), MORE, options=OPTIONS)

    assert held(path) == [document.tolist() for document in [*DOCUMENTS, *MORE]]
    assert verify_remote_store(LocalStore(path), options=OPTIONS).sound
    assert verify_store(path).sound


def test_a_merged_store_and_an_empty_place_can_not_be_changed(path: Path, tmp_path: Path) -> None:
    merge_stores([path, path], tmp_path / "merged")

    with pytest.raises(StoreError, match="is made of segments"):
        append_documents(LocalStore(tmp_path / "merged"), MORE, options=OPTIONS)
    assert not (tmp_path / "merged" / "change.json").exists()
    with pytest.raises(FileNotFoundError, match="no such store"):
        append_documents(LocalStore(tmp_path / "nothing"), MORE, options=OPTIONS)
    with pytest.raises(IndexError, match="has no document 99"):
        erase_documents(LocalStore(path), [99], reason="x", options=OPTIONS)
    assert not (path / "change.json").exists()


def test_a_store_is_fetched_with_its_segments(path: Path, tmp_path: Path) -> None:
    append_documents(path, MORE)
    merge_stores([path, path], tmp_path / "merged")

    download_store(LocalStore(tmp_path / "merged"), tmp_path / "here", options=OPTIONS)

    assert files(tmp_path / "here") == files(tmp_path / "merged")
    with pytest.raises(StoreError, match="exists; choose another name"):
        download_store(LocalStore(path), tmp_path / "here", options=OPTIONS)
    victim = path / "tokens" / "c" / "0"
    victim.write_bytes(b"x" + victim.read_bytes()[1:])
    with pytest.raises(DamagedError, match="tokens/c/0: the content differs"):
        download_store(LocalStore(path), tmp_path / "never", options=OPTIONS)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["here", "merged", "s"]


def test_merge_join_and_repack_take_urls(path: Path, tmp_path: Path) -> None:
    write_small(tmp_path / "more", MORE, layout=open_store(path).manifest.layout)
    both = [url_of(path), tmp_path / "more"]
    documents = [*DOCUMENTS, *MORE]

    merge_stores(both, tmp_path / "merged")
    join_stores(both, tmp_path / "joined")
    repack_store(url_of(tmp_path / "merged"), tmp_path / "repacked", layout="archive")

    for name in ("merged", "joined", "repacked"):
        assert_holds(open_store(tmp_path / name), documents)
        assert verify_store(tmp_path / name).sound
    assert len(list(tmp_path.iterdir())) == 5  # what was fetched is gone


def test_the_commands_take_urls(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merged = str(tmp_path / "merged")

    assert main(["merge", url_of(path), str(path), "--output", merged]) == 0
    assert main(["erase", url_of(path), "--documents", "1", "--reason", "asked for"]) == 0
    assert "old versions of objects" in capsys.readouterr().err
    erase = ["erase", url_of(path), "--documents", "2", "--reason", "x", "--search", "."]
    assert main(erase) == 2
    assert main(["repack", url_of(path), "--layout", "hot", "--output", f"{merged}-hot"]) == 0
    assert len(open_store(f"{merged}-hot")[1]) == 0
    assert main(["erase", url_of(tmp_path / "no"), "--documents", "1", "--reason", "x"]) == 3
    assert "there is no such store" in capsys.readouterr().err
