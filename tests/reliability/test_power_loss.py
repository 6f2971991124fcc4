"""The power goes at any moment of any writer: what it promises holds, and no sync is one too many.

The system calls of a whole command are traced, whatever library makes them, and every state that a
disk may then be in is judged. Mutants: with any one `fsync` or renaming left out, some state breaks
the promise. A part always; every writer with the environment variable MDS_RELIABILITY=full.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from power_loss import Disk, fingerprint, materialise, mutants, states_after, tree_of
from promises import PROMISES, recipient_of, write_step
from recorded_calls import OPTIONS, Operation, operations_in
from test_failing_calls import Server, Work
from test_killed_saves import FULL, strace_works

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not strace_works(), reason="needs strace, which may trace"),
]

ALWAYS = ("sealed-save",)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("steps")
    write_step(root, 3)
    return root / "step-3"


class Judge:
    """Says of each state once what is wrong with it."""

    def __init__(self, work: Work, folder: Path) -> None:
        self._work, self._folder = work, folder
        self._known: dict[tuple[bool, int], str] = {}

    def first_fault(
        self, before: Path, operations: Sequence[Operation], *, at: Path, since: int = 0
    ) -> str:
        """What is wrong with the first bad state; nothing if none is."""
        for harshest in (True, False):
            for finished, tree in states_after(
                before, operations, at=at, since=since, harshest=harshest
            ):
                key = (finished, fingerprint(tree))
                if key not in self._known:
                    self._known[key] = self._fault(tree, finished=finished)
                if self._known[key]:
                    return self._known[key]
        return ""

    def _fault(self, tree: dict[str, object], *, finished: bool) -> str:
        shutil.rmtree(self._folder, ignore_errors=True)
        materialise(tree, self._folder)
        try:
            if self._work.is_new(self._folder):
                return ""
            if finished:
                return "it had returned, and its work is not there"
            return "" if self._work.is_old(self._folder) else "neither old nor new"
        except (AssertionError, KeyError, OSError, ValueError) as error:
            return f"neither old nor new: {error!r}"


def recorded(server: Server, work: Work, folder: Path) -> list[Operation]:
    log = folder.with_name("trace")
    found = server.run_traced(work, folder, *OPTIONS, "-o", str(log))
    assert found["code"] == 0, found
    return operations_in(log.read_text(), folder=folder)


@dataclass(frozen=True)
class Record:
    """What a writer did, and who judges what may be left of it."""

    operations: list[Operation]
    before: Path
    folder: Path
    judge: Judge

    def first_fault(self, operations: Sequence[Operation], *, since: int = 0) -> str:
        return self.judge.first_fault(self.before, operations, at=self.folder, since=since)


def record(server: Server, step: Path, tmp_path: Path, work: Work) -> Record:
    """Run a writer once to warm up and once under strace."""
    folder, before = tmp_path / "work", tmp_path / "before"
    before.mkdir()
    work.prepare(before, step)
    work = replace(work, argv=[word.replace("RECIPIENT", _recipient(before)) for word in work.argv])
    for warm in (True, False):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder)
        if warm:
            assert server.order(work, folder, warm=True)["code"] == 0
    operations = recorded(server, work, folder)
    disk = Disk(before, at=folder)
    for operation in operations:
        disk.do(operation)
    assert disk.tree() == tree_of(folder), "the trace does not tell all that was done"
    folder.rename(tmp_path / "after")
    return Record(operations, before, folder, Judge(work, tmp_path / "state"))


@pytest.mark.parametrize("name", PROMISES if FULL else ALWAYS)
def test_a_power_loss_at_any_moment_breaks_no_promise(
    server: Server, step: Path, tmp_path: Path, name: str
) -> None:
    found = record(server, step, tmp_path, PROMISES[name].work)

    assert found.first_fault(found.operations) == ""


@pytest.mark.parametrize("name", PROMISES if FULL else ALWAYS)
def test_every_sync_and_every_renaming_is_needed(
    server: Server, step: Path, tmp_path: Path, name: str
) -> None:
    found = record(server, step, tmp_path, PROMISES[name].work)

    survivors = [
        named(found.operations[number], found.folder)
        for number, rest in mutants(found.operations)
        if not found.first_fault(rest, since=number)
    ]

    assert survivors == list(PROMISES[name].spare)


def named(operation: Operation, folder: Path) -> str:
    """What an operation does, without what differs in every run."""
    words = f"{operation.kind} {operation.path.relative_to(folder)}"
    return re.sub(r"(partial|replaced)-[0-9a-f]+|~.*", r"\1", words)


def _recipient(folder: Path) -> str:
    key = folder / "key.txt"
    return recipient_of(key) if key.exists() else ""
