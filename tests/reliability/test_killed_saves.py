"""A save that is killed, or meets a full disk, at any operation: old or new, whole, never between.

Every few operations always; every one, and the system calls by strace, with the environment
variable MDS_RELIABILITY=full.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mds_ckpt import commit
from mds_data import write_store

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]

FULL = os.environ.get("MDS_RELIABILITY") == "full"
SERVER = Path(__file__).with_name("save_server.py")
POINTS = 12
"""Operations of each scenario that are tried always."""

SCENARIOS: Mapping[str, Mapping[str, Any]] = {
    "new": {},
    "background": {"async_save": True},
    "prune": {"keep_last": 1},
    "replace": {},
    "backup": {"backup": "second"},
}
CALLS = (
    "openat,write,pwrite64,fsync,rename,renameat,unlink,unlinkat,mkdir,rmdir,close,lseek,ftruncate"
)


class Server:
    """The process that forks saving children."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=folder,
        )
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline()) != "ready\n":
            assert line, "the saving process did not start"

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def order(self, how: str, **rest: Any) -> dict[str, Any]:
        """Let a child save; how it ended."""
        self.send(how, **rest)
        return self.answer()

    def send(self, how: str, **rest: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"how": how, **rest}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("killed")
    random = np.random.default_rng(3)
    documents = [random.integers(0, 64, 40) for _ in range(20)]
    write_store(folder / "store", documents, vocab_size=64, eod_id=0)
    found = Server(folder)
    shutil.copytree(folder / "run" / "checkpoints", folder / "before")
    yield found
    found.close()


@pytest.fixture(scope="module")
def expected(server: Server) -> dict[str, dict[str, str]]:
    """Digests of the files of both checkpoints, from a save that nobody disturbed."""
    root = reset(server, "new")
    assert server.order("save", settings={})["status"] == 0
    return {folder.name: digests(folder) for folder in commit.step_folders(root)}


def digests(folder: Path) -> dict[str, str]:
    manifest = commit.check_folder(folder, digests=True)
    return {name: record.sha256 for name, record in manifest.files.items()}


def reset(server: Server, scenario: str) -> Path:
    """The folder of checkpoints as it was before the save."""
    root = server.folder / "run" / "checkpoints"
    shutil.rmtree(root, ignore_errors=True)
    shutil.rmtree(server.folder / "second", ignore_errors=True)
    shutil.copytree(server.folder / "before", root)
    if scenario == "replace":  # an older future of the same step is there
        assert server.order("save", settings={})["status"] == 0
    return root


def operations_of(server: Server, scenario: str) -> int:
    reset(server, scenario)
    count = server.folder / "count"
    server.order("save", settings=SCENARIOS[scenario], count=str(count))
    return int(count.read_text())


def points(number: int) -> list[int]:
    """All operations, or some of them with the first and the last."""
    if FULL:
        return list(range(1, number + 1))
    return sorted({1 + round(index * (number - 1) / (POINTS - 1)) for index in range(POINTS)})


def check_whole(root: Path, expected: Mapping[str, dict[str, str]]) -> str:
    """What a resume would take is exactly the old or the new checkpoint."""
    found = commit.find_latest(root)
    assert found.folder is not None
    assert found.skipped == []
    assert digests(found.folder) == expected[found.folder.name]
    # A hint for people, which a kill may leave behind the truth; but never half a line.
    if (root / "latest").exists():
        assert (root / "latest").read_text() in {f"{name}\n" for name in expected}
    return found.folder.name


def check_next_save(server: Server, root: Path, settings: Mapping[str, Any]) -> None:
    """The next save needs no help and leaves nothing of the dead one."""
    assert server.order("save", settings=settings)["status"] == 0
    names = {path.name for path in root.iterdir()}
    assert names <= {"step-3", "step-5", "latest", ".mds-lock"}
    assert (root / "latest").read_text() == "step-5\n"


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("how", ["kill", "full", *(["broken"] if FULL else [])])
def test_a_save_is_there_or_it_is_not(
    server: Server, expected: dict[str, dict[str, str]], scenario: str, how: str
) -> None:
    settings = SCENARIOS[scenario]
    number = operations_of(server, scenario)
    taken: Counter[str] = Counter()

    for at in points(number):
        root = reset(server, scenario)
        answer = server.order(how, at=at, settings=settings, said=str(server.folder / "said"))

        copying = scenario == "backup" and answer["status"] == 0  # a failed copy ends no run
        assert answer["status"] == (-signal.SIGKILL if how == "kill" else 4) or copying, at
        taken[check_whole(root, expected)] += 1
        if how != "kill" and answer["status"] == 4:
            assert not list(root.glob("*.partial-*")), at
        second = server.folder / "second" / "checkpoints"
        if second.is_dir() and commit.step_folders(second):
            assert check_whole(second, expected) == "step-5"
        if at == number // 2 or FULL:
            check_next_save(server, root, settings)

    assert number > 20
    if scenario != "replace":
        assert set(taken) == {"step-3", "step-5"}, "kills before and after the commit"


def test_two_writers_one_wins_and_the_other_says_who(server: Server) -> None:
    root = reset(server, "new")
    said = server.folder / "said"

    with commit.lock(root):
        answer = server.order("save", settings={}, said=str(said))

    assert answer["status"] == 3
    assert f"is being written by another process ({os.getpid()}" in said.read_text()
    assert [folder.name for folder in commit.step_folders(root)] == ["step-3"]


def strace_works() -> bool:
    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "-o", os.devnull, "true"], check=False).returncode == 0


@pytest.mark.skipif(not (FULL and strace_works()), reason="needs strace and MDS_RELIABILITY=full")
def test_a_save_that_is_killed_at_any_system_call(
    server: Server, expected: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    traced = traced_calls(server, tmp_path)
    assert sum(traced.values()) >= 100

    for call, number in sorted(traced.items()):
        for at in range(1, number + 1):
            root = reset(server, "new")
            status = save_under_strace(
                server, tmp_path, "-e", f"inject={call}:signal=KILL:when={at}"
            )
            assert status in (-signal.SIGKILL, 0), (call, at)
            check_whole(root, expected)


@pytest.mark.skipif(not (FULL and strace_works()), reason="needs strace and MDS_RELIABILITY=full")
@pytest.mark.parametrize("how", ["error=EIO", "error=EDQUOT", "error=EROFS", "retval=7"])
def test_a_save_of_which_any_system_call_fails(
    server: Server, expected: dict[str, dict[str, str]], tmp_path: Path, how: str
) -> None:
    """``retval=7`` is a system that claims to have written seven bytes, of which none arrives."""
    traced = traced_calls(server, tmp_path)
    failed: Counter[int] = Counter()

    for call, number in sorted(traced.items()):
        if how == "retval=7" and "write" not in call:
            continue
        for at in range(1, number + 1):
            root = reset(server, "new")
            status = save_under_strace(server, tmp_path, "-e", f"inject={call}:{how}:when={at}")
            assert status in (0, 4), (call, at)
            assert check_whole(root, expected) == "step-5" or status == 4, (call, at)
            failed[status] += 1

    assert failed[4] > failed[0]


def traced_calls(server: Server, folder: Path) -> Counter[str]:
    """How often each system call on files occurs in one save."""
    reset(server, "new")
    log = folder / "trace"
    assert save_under_strace(server, folder, "-o", str(log)) == 0
    names = (line.split("(")[0].split()[-1] for line in log.read_text().splitlines() if "(" in line)
    return Counter(name for name in names if name in CALLS.split(","))


def save_under_strace(server: Server, folder: Path, *options: str) -> int:
    """Let a child save with strace at its side; its exit status."""
    server.send("wait", settings={}, said=str(folder / "said"))
    pid = server.answer()["pid"]
    quiet = [] if "-o" in options else ["-o", os.devnull]
    tracer = subprocess.Popen(
        ["strace", "-f", "-p", str(pid), "-e", f"trace={CALLS}", *quiet, *options],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert tracer.stderr is not None
    assert "attached" in tracer.stderr.readline()
    os.kill(pid, signal.SIGUSR1)
    status = int(server.answer()["status"])
    tracer.wait()
    tracer.stderr.close()
    return status
