"""Every system call on files of a command fails once, for each reason that a system gives.

What was committed before stays whole, what was to appear is whole or absent, the command says so
in one sentence, and the next run needs no help. Needs strace; runs with the environment variable
MDS_RELIABILITY=full.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_killed_saves import FULL, strace_works
from test_killed_saves import Server as TrainingServer

from mds_ckpt.cli import main as ckpt_main
from mds_ckpt.target_folder import remove_remains
from mds_data import write_store
from mds_data.cli import main as data_main

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not (FULL and strace_works()), reason="needs strace, MDS_RELIABILITY=full"),
]

SERVER = Path(__file__).with_name("command_server.py")
WRITING = ("ENOSPC", "EDQUOT", "EIO", "EROFS")
ERRORS = {
    "openat": WRITING,
    "write": (*WRITING, "short"),
    "pwrite64": (*WRITING, "short"),
    "ftruncate": WRITING,
    "fsync": ("EIO", "ENOSPC", "EDQUOT"),
    "mkdir": WRITING,
    "link": ("EIO", "EROFS", "EMLINK"),
    **dict.fromkeys(("rename", "renameat", "renameat2", "unlink", "unlinkat"), ("EIO", "EROFS")),
    **dict.fromkeys(("rmdir", "close", "read", "pread64", "preadv", "preadv2"), ("EIO",)),
}
"""System calls on files, and why each fails. A short write is one of which the system claims to
have done seven bytes, and none arrives."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A command, and what must be true before and after it."""

    module: str
    argv: Sequence[str]
    """``{}`` is the folder."""
    prepare: Callable[[Path, Path], None]
    """Makes the folder what it is before, from a checkpoint."""
    is_old: Callable[[Path], bool]
    """Whether what was there before is as it was."""
    is_new: Callable[[Path], bool]
    """Whether the command's work is there, whole."""


def quietly(module: Callable[[Sequence[str]], int], *words: object) -> bool:
    return module([str(word) for word in words]) == 0


def checkpoint(folder: Path, step: Path) -> None:
    shutil.copytree(step, folder / "step-1")


def converted(folder: Path, step: Path) -> None:
    checkpoint(folder, step)
    assert quietly(ckpt_main, "convert", folder / "step-1", folder / "out", "--to", "hf")
    (folder / "out" / "README.md").write_text("an older one")


def backed_up(folder: Path, step: Path) -> None:
    checkpoint(folder, step)
    assert quietly(ckpt_main, "backup", folder / "step-1", "--to", folder / "second")
    (folder / "step-1").rename(folder / "step-2")


def stores(folder: Path, _: Path) -> None:
    chance = np.random.default_rng(1)
    for name in ("a", "b"):
        documents = [chance.integers(0, 64, 40) for _ in range(5)]
        write_store(folder / name, documents, vocab_size=64, eod_id=0)


def verified(main: Callable[[Sequence[str]], int], name: str) -> Callable[[Path], bool]:
    return lambda folder: (folder / name).exists() and quietly(main, "verify", folder / name)


def settled(folder: Path) -> bool:
    """Whether the older target is whole, as the next conversion finds it."""
    remove_remains(folder / "out", keep=folder / "step-1")
    return quietly(ckpt_main, "verify", folder / "out") and (folder / "out/README.md").exists()


def both_stores(folder: Path) -> bool:
    return all(quietly(data_main, "verify", folder / name) for name in ("a", "b"))


def erased(folder: Path) -> bool:
    manifest = json.loads((folder / "a" / "manifest.json").read_text())
    return "wanted" in json.dumps(manifest) and quietly(data_main, "verify", folder / "a")


STEP = verified(ckpt_main, "step-1")
WORKS = {
    "convert": Work(
        module="mds_ckpt.cli",
        argv=["convert", "{}/step-1", "{}/out", "--to", "hf", "--jobs", "1"],
        prepare=checkpoint,
        is_old=lambda folder: STEP(folder) and not (folder / "out").exists(),
        is_new=verified(ckpt_main, "out"),
    ),
    "replace": Work(
        module="mds_ckpt.cli",
        argv=["convert", "{}/step-1", "{}/out", "--to", "hf", "--jobs", "1", "--overwrite"],
        prepare=converted,
        is_old=lambda folder: STEP(folder) and settled(folder),
        is_new=verified(ckpt_main, "out"),
    ),
    "backup": Work(
        module="mds_ckpt.cli",
        argv=["backup", "{}/step-2", "--to", "{}/second"],
        prepare=backed_up,
        is_old=lambda folder: quietly(ckpt_main, "verify", "--to", folder / "second"),
        is_new=lambda folder: (
            len(list((folder / "second" / "snapshots").glob("*.json"))) == 2
            and quietly(ckpt_main, "verify", "--to", folder / "second")
        ),
    ),
    "merge": Work(
        module="mds_data.cli",
        argv=["merge", "{}/a", "{}/b", "--output", "{}/whole"],
        prepare=stores,
        is_old=both_stores,
        is_new=verified(data_main, "whole"),
    ),
    "erase": Work(
        module="mds_data.cli",
        argv=["erase", "{}/a", "--documents", "1", "--reason", "wanted"],
        prepare=stores,
        is_old=both_stores,
        is_new=erased,
    ),
}


class Server:
    """The process that runs commands."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def order(self, work: Work, folder: Path, *, warm: bool) -> dict[str, Any]:
        argv = [word.format(folder) for word in work.argv]
        assert self._process.stdin is not None
        order = {"module": work.module, "argv": argv, "warm": warm}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def run_traced(self, work: Work, folder: Path, *options: str) -> dict[str, Any]:
        """Run with strace at the child's side."""
        pid = self.order(work, folder, warm=False)["pid"]
        command = ["strace", "-f", "-p", str(pid), "-e", f"trace={','.join(ERRORS)}", *options]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
            assert tracer.stderr is not None
            assert "attached" in tracer.stderr.readline()
            os.kill(pid, signal.SIGUSR1)
            return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a model that was trained for three steps."""
    folder = tmp_path_factory.mktemp("trained")
    documents = [np.arange(40) % 64 for _ in range(20)]
    write_store(folder / "store", documents, vocab_size=64, eod_id=0)
    TrainingServer(folder).close()
    return folder / "run" / "checkpoints" / "step-3"


def calls_of(server: Server, work: Work, folder: Path) -> list[tuple[str, int]]:
    """The system calls on files of the folder, each with its number among those of its name.

    Opening to read is told apart: a disk is not full then.
    """
    log = folder.with_name("trace")
    assert server.run_traced(work, folder, "-y", "-o", str(log))["code"] == 0
    counted: Counter[str] = Counter()
    found = []
    for line in log.read_text().splitlines():
        name = line.split("(")[0].split()[-1]
        if "(" in line and name in ERRORS:
            counted[name] += 1
            if str(folder) in line:
                reads = name == "openat" and "O_RDONLY" in line
                found.append(("openat to read" if reads else name, counted[name]))
    return found


def injections(calls: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Each way in which each call may fail, as strace spells it."""
    for call, at in calls:
        for error in ERRORS.get(call, ("EIO",)):
            how = "retval=7" if error == "short" else f"error={error}"
            yield f"inject={call.partition(' ')[0]}:{how}:when={at}"


@pytest.mark.parametrize("name", WORKS)
def test_a_command_survives_the_failure_of_any_system_call(
    server: Server, step: Path, tmp_path: Path, name: str
) -> None:
    work = WORKS[name]

    def fresh() -> Path:
        folder = tmp_path / "work"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        work.prepare(folder, step)
        return folder

    assert server.order(work, fresh(), warm=True)["code"] == 0
    calls = calls_of(server, work, fresh())
    assert len(calls) > 25

    codes: Counter[int] = Counter()
    for injection in injections(calls):
        folder = fresh()
        found = server.run_traced(work, folder, "-o", os.devnull, "-e", injection)

        codes[found["code"]] += 1
        check(work, folder, found, where=injection)
    assert codes[4] > codes[0], codes


def check(work: Work, folder: Path, found: dict[str, Any], *, where: str) -> None:
    """Old or new, one sentence, and the next run needs no help."""
    assert found["code"] in {0, 3, 4}, (where, found)
    assert work.is_old(folder) or work.is_new(folder), where
    if found["code"]:
        said = found["said"]
        assert said.count("\n") == 1, (where, said)
        assert "fault of" not in said, (where, said)
    else:
        assert work.is_new(folder), where
