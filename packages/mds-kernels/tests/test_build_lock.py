import os
import sys
from pathlib import Path

import pytest

from mds_kernels.build_lock import clear_stale, extensions_folder, find_locks

NOW = 1_000_000.0


def put_lock(folder, name, *, age):
    path = folder / "py311_cpu" / name / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    os.utime(path, (NOW - age, NOW - age))
    return path


def test_an_old_lock_that_nobody_holds_is_stale(tmp_path):
    put_lock(tmp_path, "cpu_adam", age=3600)

    (lock,) = find_locks(tmp_path, now=NOW)

    assert lock.age_seconds == 3600
    assert lock.holders == ()
    assert lock.stale


def test_a_young_lock_may_belong_to_a_build_on_another_host(tmp_path):
    put_lock(tmp_path, "cpu_adam", age=60)

    assert not find_locks(tmp_path, now=NOW)[0].stale


@pytest.mark.skipif(sys.platform != "linux", reason="holders are found through /proc")
def test_a_lock_that_a_process_holds_is_not_stale_and_names_it(tmp_path):
    path = put_lock(tmp_path, "cpu_adam", age=3600)

    with path.open():  # as torch's FileBaton does while it builds
        (lock,) = find_locks(tmp_path, now=NOW)

    assert lock.holders == (os.getpid(),)
    assert not lock.stale


def test_only_stale_locks_are_cleared(tmp_path):
    old = put_lock(tmp_path, "cpu_adam", age=3600)
    young = put_lock(tmp_path, "utils", age=60)

    remaining = clear_stale(find_locks(tmp_path, now=NOW))

    assert [lock.path for lock in remaining] == [young]
    assert not old.exists()
    assert young.exists()


def test_no_folder_has_no_locks(tmp_path):
    assert find_locks(tmp_path / "nowhere", now=NOW) == []


def test_the_folder_is_that_of_torch():
    assert extensions_folder({"TORCH_EXTENSIONS_DIR": "/x"}) == Path("/x")
    if sys.platform == "linux":
        assert extensions_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/torch_extensions")
