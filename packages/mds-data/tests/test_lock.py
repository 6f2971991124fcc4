import json
import os
import socket
import subprocess
import sys

import pytest

from mds_data import LockedError, open_store, write_store
from mds_data.store.append import append_documents
from mds_data.store.lock import StoreLock


def test_a_second_writer_is_told_who_holds_the_store(tmp_path):
    with (
        StoreLock(tmp_path / "s"),
        pytest.raises(LockedError, match=f"process {os.getpid()} on {socket.gethostname()} since"),
    ):
        write_store(tmp_path / "s", [[1]], vocab_size=10)


def test_the_lock_is_gone_afterwards(tmp_path):
    with StoreLock(tmp_path / "s"):
        assert (tmp_path / "s.lock").exists()
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from mds_data.store.lock import StoreLock\n"
        "StoreLock(Path(sys.argv[1])).__enter__(); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], check=False)
    assert json.loads((tmp_path / "s.lock").read_text())["pid"] != os.getpid()

    write_store(tmp_path / "s", [[1]], vocab_size=10)

    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_the_lock_of_another_host_is_respected(tmp_path):
    owner = {"pid": 1, "host": "elsewhere", "since": "2026-01-01T00:00:00+00:00"}
    (tmp_path / "s.lock").write_text(json.dumps(owner))
    with pytest.raises(LockedError, match=r"process 1 on elsewhere since 2026.*remove .*s\.lock"):
        write_store(tmp_path / "s", [[1]], vocab_size=10)


@pytest.mark.parametrize("content", ["", "garbage", "[]", '{"pid": "x"}'])
def test_a_broken_lock_file_does_not_stop_a_writer(tmp_path, content):
    (tmp_path / "s.lock").write_text(content)
    write_store(tmp_path / "s", [[1]], vocab_size=10)


def test_readers_need_no_lock(tmp_path):
    write_store(tmp_path / "s", [[1]], vocab_size=10)
    with StoreLock(tmp_path / "s"):
        assert open_store(tmp_path / "s")[0].tolist() == [1]
        with pytest.raises(LockedError):
            append_documents(tmp_path / "s", [[2]])
