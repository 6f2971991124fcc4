"""Saves that are killed, resumed and saved again, many times over: nothing grows, nothing is lost.

Five cycles always; 300 with the environment variable MDS_RELIABILITY=full.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_killed_saves import SERVER, Server, digests

from mds_ckpt import commit
from mds_data import write_store

FULL = os.environ.get("MDS_RELIABILITY") == "full"
CYCLES = 300 if FULL else 5
SEED = 20261130

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files in /proc"),
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    assert SERVER.is_file()
    chance = np.random.default_rng(3)
    documents = [chance.integers(0, 64, 40) for _ in range(20)]
    write_store(tmp_path / "store", documents, vocab_size=64, eod_id=0)
    found = Server(tmp_path)
    yield found
    found.close()


def resident_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def open_files(server: Server) -> dict[int, int]:
    """How many files the saving process and this one have open."""
    return {pid: len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (server.pid, os.getpid())}


def test_many_cycles_of_save_kill_and_resume_lose_nothing_and_leave_nothing(
    server: Server, tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    root = tmp_path / "run" / "checkpoints"
    before = digests(root / "step-3")
    assert server.order("save", settings={"keep_last": 2})["status"] == 0
    after = digests(root / "step-5")
    shutil.rmtree(root / "step-5")
    files = open_files(server)
    memory = resident_bytes(server.pid)
    killed = 0

    for cycle in range(CYCLES):
        answer = server.order("kill", at=chance.randrange(1, 45), settings={"keep_last": 2})
        killed += answer["status"] == -signal.SIGKILL
        found = commit.find_latest(root)
        assert found.folder is not None, f"seed {SEED}, cycle {cycle}"
        assert found.skipped == []
        expected = after if found.folder.name == "step-5" else before
        assert digests(found.folder) == expected, f"seed {SEED}, cycle {cycle}"

        assert server.order("save", settings={"keep_last": 2})["status"] == 0
        names = {path.name for path in root.iterdir()}
        assert names <= {"step-3", "step-5", "latest", ".mds-lock"}, f"seed {SEED}, cycle {cycle}"
        shutil.rmtree(root / "step-5")
        (root / "latest").write_text("step-3\n")

    assert killed >= CYCLES // 2
    assert open_files(server) == files
    assert resident_bytes(server.pid) < memory + 32 * 2**20
