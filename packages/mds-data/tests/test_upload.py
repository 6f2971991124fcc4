"""A store that is sent arrives whole or not at all, also when the network is bad."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from store_material import random_documents, write_small
from zarr.storage import LocalStore, WrapperStore

from mds_data import DamagedError, StoreError, open_store, write_store
from mds_data.cli import main
from mds_data.store.append import append_documents
from mds_data.store.merge import merge_stores
from mds_data.store.remote import RemoteOptions
from mds_data.store.remote_files import RemoteError, RetryPolicy
from mds_data.store.upload import check_free_place, upload_files, upload_store
from mds_data.store.verify import verify_store

DOCUMENTS = random_documents(40, seed=4, longest=120)
OPTIONS = RemoteOptions(retries=RetryPolicy(attempts=4, first_wait=0.0, timeout=20))


class Unreliable(WrapperStore):
    """The first writes of each file fail or never end; one write may be the last of all."""

    def __init__(self, store, *, failing: int = 0, hanging: int = 0, last: int | None = None):
        super().__init__(store)
        self.failing, self.hanging, self.last = failing, hanging, last
        self.written: list[str] = []
        self.tries: dict[str, int] = {}

    async def _try(self, key: str) -> None:
        self.tries[key] = self.tries.get(key, 0) + 1
        if self.tries[key] <= self.hanging:
            await asyncio.sleep(60)
        if self.tries[key] <= self.failing:
            raise ConnectionError(f"try {self.tries[key]} failed")
        if self.last is not None and len(self.written) >= self.last:
            raise PermissionError("the key was revoked")
        self.written.append(key)

    async def set(self, key, value):
        await self._try(key)
        await super().set(key, value)

    async def set_if_not_exists(self, key, value):
        await self._try(key)
        await super().set_if_not_exists(key, value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_small(tmp_path / "s", DOCUMENTS)
    return tmp_path / "s"


def names(folder: Path) -> set[str]:
    return {each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file()}


def assert_is_copy(copy: Path, source: Path) -> None:
    assert names(copy) == names(source)
    assert all((copy / name).read_bytes() == (source / name).read_bytes() for name in names(copy))
    assert verify_store(copy).sound


def test_a_store_arrives_with_its_manifest_last(path: Path, tmp_path: Path) -> None:
    place = Unreliable(LocalStore(tmp_path / "t"))
    arrived: list[int] = []

    upload_store(path, place, options=OPTIONS, on_bytes=arrived.append)

    assert_is_copy(tmp_path / "t", path)
    assert place.written[0] == "upload.json"
    assert place.written[-1] == "manifest.json"
    assert sum(arrived) == sum(each.size for each in open_store(path).manifest.files.values())


def test_a_merged_store_arrives_with_its_segments(path: Path, tmp_path: Path) -> None:
    append_documents(path, [[1, 2, 3]])
    merge_stores([path, path], tmp_path / "merged")

    upload_store(tmp_path / "merged", LocalStore(tmp_path / "t"), options=OPTIONS)

    assert_is_copy(tmp_path / "t", tmp_path / "merged")
    np.testing.assert_array_equal(open_store(tmp_path / "t")[-1], [1, 2, 3])


@pytest.mark.parametrize("fault", [{"failing": 3}, {"hanging": 1}])
def test_failing_and_endless_writes_are_tried_again(path: Path, tmp_path: Path, fault) -> None:
    place = Unreliable(LocalStore(tmp_path / "t"), **fault)
    policy = RetryPolicy(attempts=5, first_wait=0.0, timeout=0.3 if "hanging" in fault else 20)

    upload_store(path, place, options=RemoteOptions(retries=policy))

    assert_is_copy(tmp_path / "t", path)


def test_after_all_tries_the_file_is_named_and_no_store_is_there(
    path: Path, tmp_path: Path
) -> None:
    place = Unreliable(LocalStore(tmp_path / "t"), failing=9)

    with pytest.raises(RemoteError, match=r"can't be written after 4 tries \(try 4 failed\)"):
        upload_store(path, place, options=OPTIONS)
    assert "manifest.json" not in names(tmp_path / "t")


def test_an_upload_that_ends_anywhere_leaves_no_store_and_goes_on(
    path: Path, tmp_path: Path
) -> None:
    files = len(open_store(path).manifest.files)
    for last in range(files + 2):  # the claim, the files, the manifest
        target = tmp_path / f"t{last}"
        with pytest.raises(PermissionError, match="access denied"):
            upload_store(path, Unreliable(LocalStore(target), last=last), options=OPTIONS)
        assert not (target / "manifest.json").exists()

        upload_store(path, LocalStore(target), options=OPTIONS)

        assert_is_copy(target, path)


def test_the_same_store_again_changes_nothing_and_another_is_refused(
    path: Path, tmp_path: Path
) -> None:
    place = Unreliable(LocalStore(tmp_path / "t"))
    upload_store(path, place, options=OPTIONS)
    before = list(place.written)
    upload_store(path, place, options=OPTIONS)
    assert place.written == before

    write_small(tmp_path / "other", DOCUMENTS[:5])
    with pytest.raises(StoreError, match="holds a store; choose another name"):
        upload_store(tmp_path / "other", place, options=OPTIONS)
    with pytest.raises(StoreError, match="holds a store"):
        check_free_place(place, options=OPTIONS)
    assert_is_copy(tmp_path / "t", path)


def test_two_uploads_of_other_stores_never_mix(path: Path, tmp_path: Path) -> None:
    with pytest.raises(PermissionError):
        upload_store(path, Unreliable(LocalStore(tmp_path / "t"), last=3), options=OPTIONS)
    write_small(tmp_path / "other", DOCUMENTS[:5])

    with pytest.raises(StoreError, match="another upload is on its way there, or was killed"):
        upload_store(tmp_path / "other", LocalStore(tmp_path / "t"), options=OPTIONS)


def test_a_damaged_source_is_not_sent(path: Path, tmp_path: Path) -> None:
    data = bytearray((path / "tokens/c/1").read_bytes())
    data[9] ^= 1
    (path / "tokens/c/1").write_bytes(data)

    with pytest.raises(DamagedError, match="tokens/c/1: the content differs"):
        upload_store(path, LocalStore(tmp_path / "t"), options=OPTIONS)
    assert "manifest.json" not in names(tmp_path / "t")


def test_plain_files_are_sent_the_last_one_at_the_end(tmp_path: Path) -> None:
    pair = [tmp_path / "p.bin", tmp_path / "p.idx"]
    for file in pair:
        file.write_bytes(file.name.encode() * 100)
    place = Unreliable(LocalStore(tmp_path / "t"), failing=1)

    upload_files(pair, place, options=OPTIONS)

    assert place.written == ["p.bin", "p.idx"]
    assert (tmp_path / "t/p.idx").read_bytes() == pair[1].read_bytes()
    with pytest.raises(StoreError, match=r"p\.bin: exists"):
        upload_files(pair, place, options=OPTIONS)


def test_commands_take_urls_and_clean_up(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.chdir(tmp_path)
    far = f"file://{tmp_path}/far"

    assert main(["repack", "s", "--layout", "archive", "--output", f"{far}/archive"]) == 0
    assert main(["split", "s", "--split", "80,20,0", "--output", f"{far}/parts"]) == 0
    assert main(["merge", "s", "s", "--output", f"{far}/merged"]) == 0
    assert main(["export", "s", "--output-prefix", f"{far}/pair"]) == 0
    capsys.readouterr()
    assert main(["export", "s", "--output-prefix", f"{far}/merged"]) == 3
    assert "far/merged: holds a store" in capsys.readouterr().err
    assert main(["repack", "s", "--layout", "hot", "--output", "s3://bucket"]) == 2

    for name in ("archive", "parts/train", "parts/valid", "merged", "pair"):
        assert len(open_store(tmp_path / "far" / name)) > 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["far", "s"]


def test_a_writer_says_how_a_store_gets_to_a_url() -> None:
    with pytest.raises(StoreError, match="upload_store sends it to a URL"):
        write_store("s3://bucket/store", [[1]], vocab_size=2)
    assert not Path("s3:").exists()
