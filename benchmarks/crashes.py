"""What is left of saved work after accidents: ours, torch, DeepSpeed, DCP, safetensors, zarr.

    python benchmarks/crashes.py [CONTESTANT ...]

Each saves about 100 KB over an older state, and meets every accident of the same list: killed at
each system call on files, failing calls, a limit in the middle of a file, a second writer, a power
loss at every moment, flipped bits and cut files. Then it loads as its users do. A cell counts:

    good      the old or the new state, whole
    noticed   an error, while a whole state can still be found by hand
    lost      an error, and no whole state is left
    silent    something else than any state that was ever saved, without an error
    undone    the save said that it was done, and the old state is there
    hung, crashed

After damage to what was saved, an error is what one asks for: noticed and lost are one. Needs Linux
and strace. Who is not installed is left out. It ends with 1 if ours are ever anything but good.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "reliability"))
from crash_contestants import CONTESTANTS, NEW, OLD, OTHER, OWN  # noqa: E402
from power_loss import Disk, materialise, states_after, tree_of  # noqa: E402
from recorded_calls import OPTIONS, operations_in  # noqa: E402

SEED = 20261201
FLIPS, CUTS, LIMITS, MEETINGS, STATES = 1000, 16, 24, 24, 1000
"""How often, at most, of what could be done without end."""
WRITES = ("write", "pwrite64", "writev")
NAMES = ("rename", "renameat", "renameat2", "link", "linkat", "unlink", "unlinkat", "mkdir")
CALLS = ("openat", *WRITES, "ftruncate", "fsync", "fdatasync", *NAMES, "close", "lseek")
MODULES = {"torch": "torch", "renamed": "torch", "dcp": "torch", "dcp-steps": "torch"}
MODULES |= {"zarr-append": "zarr"}
Outcomes = Counter[str]


class Ground:
    """A contestant in its process, and the folder that it saves into."""

    def __init__(self, name: str, folder: Path) -> None:
        self.before, self.work, self._log = folder / "before", folder / "work", folder / "trace"
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("crash_server.py")), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._answer() == "ready"
        self.work.mkdir()
        assert self.save(OLD) == "saved"
        self.work.rename(self.before)
        self.reset()
        assert (self.save(NEW), self.load()) == ("saved", "new")

    def _answer(self) -> Any:
        assert self._server.stdout is not None
        return json.loads(self._server.stdout.readline())

    def _order(self, **order: Any) -> Any:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return self._answer()

    def start(self, number: int, **options: Any) -> int:
        """Let a child save; its process id."""
        folder = str(self.work)
        return int(self._order(do="save", folder=folder, state=number, **options))

    def collect(self, pid: int) -> str:
        """How a child ended."""
        return str(self._order(do="collect", pid=pid))

    def save(self, number: int, **options: Any) -> str:
        return self.collect(self.start(number, **options))

    def load(self, folder: Path | None = None) -> str:
        """What a user finds."""
        pid = self._order(do="load", folder=str(folder or self.work))
        return self.collect(pid)

    def reset(self) -> None:
        """The folder as it was before the save."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.before, self.work, symlinks=True)

    def trace(self, *options: str, meanwhile: Callable[[int], None] | None = None) -> str:
        """Save with strace at the side; how it went."""
        pid = self.start(NEW, wait=True)
        command = ["strace", "-f", "-p", str(pid), *options]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
            assert tracer.stderr is not None
            assert "attached" in tracer.stderr.readline()
            os.kill(pid, signal.SIGUSR1)
            if meanwhile is not None:
                while (line := tracer.stderr.readline()) and "stopped by SIGSTOP" not in line:
                    pass
                meanwhile(pid)
            said = self.collect(pid)
            tracer.stderr.read()
        return said

    @functools.cached_property
    def calls(self) -> list[tuple[str, int]]:
        """The system calls on files of the folder, each with its number among those of its name."""
        self.reset()
        said = self.trace("-y", "-e", f"trace={','.join(CALLS)}", "-o", str(self._log))
        assert said == "saved"
        counted: Counter[tuple[str, str]] = Counter()
        found = {}
        for line in self._log.read_text(errors="replace").splitlines():
            if (call := re.match(r"(\d+) +(\w+)\(", line)) is not None:
                counted[call[1], call[2]] += 1
                if str(self.work) in line:
                    reads = call[2] == "openat" and "O_RDONLY" in line
                    found[call[2], counted[call[1], call[2]]] = reads
        return [point for point, reads in found.items() if not reads]

    def record(self) -> Any:
        """The operations of one save."""
        self.reset()
        assert self.trace(*OPTIONS, "-o", str(self._log)) == "saved"
        operations = operations_in(self._log.read_text(), folder=self.work)
        disk = Disk(self.before, at=self.work)
        for operation in operations:
            disk.do(operation)
        assert disk.tree() == tree_of(self.work), "the trace does not tell all that was done"
        return operations

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def outcome(found: str, *, said: str) -> str:
    """The word of the table for what was loaded after a save."""
    if found in ("old", "new", "right"):
        return "undone" if (found, said) == ("old", "saved") else "good"
    return found


def after(ground: Ground, said: str) -> Outcomes:
    return Counter([outcome(ground.load(), said=said)])


def injected(ground: Ground, how: str, names: tuple[str, ...]) -> Outcomes:
    """Each call of these names meets something, one at a time."""
    found: Outcomes = Counter()
    for name, at in ground.calls:
        if name in names:
            ground.reset()
            injection = f"inject={name}:{how}:when={at}"
            said = ground.trace("-e", f"trace={name}", "-e", injection, "-o", os.devnull)
            found += after(ground, said)
    return found


def killed(ground: Ground) -> Outcomes:
    return injected(ground, "signal=KILL", CALLS)


def full(ground: Ground) -> Outcomes:
    return injected(ground, "error=ENOSPC", ("openat", *WRITES, "ftruncate", "mkdir"))


def broken(ground: Ground) -> Outcomes:
    names = (*WRITES, "fsync", "fdatasync", *NAMES, "close")
    return injected(ground, "error=EIO", names)


def claimed(ground: Ground) -> Outcomes:
    return injected(ground, "retval=7", WRITES)


def limited(ground: Ground) -> Outcomes:
    """No file may grow beyond a limit: a write that ends early, and an error at the next."""
    largest = max(path.stat().st_size for path in ground.work.rglob("*") if path.is_file())
    found: Outcomes = Counter()
    for number in range(LIMITS):
        ground.reset()
        said = ground.save(NEW, limit=largest * number // LIMITS + number % 3)
        found += after(ground, said)
    return found


def together(ground: Ground) -> Outcomes:
    """One stops in the middle, another saves from beginning to end, the first goes on."""
    changing = [point for point in ground.calls if point[0] not in ("close", "lseek")]
    found: Outcomes = Counter()
    for name, at in changing[:: max(1, len(changing) // MEETINGS)]:
        ground.reset()

        def meet(pid: int) -> None:
            ground.save(OTHER)
            go_on(pid)

        injection = f"inject={name}:signal=STOP:when={at}"
        ground.trace("-e", f"trace={name}", "-e", injection, meanwhile=meet)
        found += after(ground, "")
    return found


def go_on(pid: int) -> None:
    """Wake a process until it has ended: a signal that meets the tracer at work is lost."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)


def without_power(ground: Ground) -> Outcomes:
    """Every state that the disk may be in, or some of them drawn by a seed."""
    operations = ground.record()
    states = list(states_after(ground.before, operations, at=ground.work))
    if len(states) > STATES:
        states = random.Random(SEED).sample(states, STATES)
    found: Outcomes = Counter()
    for finished, tree in states:
        shutil.rmtree(ground.work, ignore_errors=True)
        materialise(tree, ground.work)
        found += after(ground, "saved" if finished else "")
    return found


def damaged(ground: Ground, changes: Callable[[Ground], Iterator[tuple[Path, bytes]]]) -> Outcomes:
    ground.reset()
    assert ground.save(NEW) == "saved"
    found: Outcomes = Counter()
    for path, data in changes(ground):
        whole = path.read_bytes()
        path.write_bytes(data)
        word = outcome(ground.load(), said="")
        found["noticed" if word == "lost" else word] += 1
        path.write_bytes(whole)
    return found


def newest_files(ground: Ground) -> list[Path]:
    """What the save wrote."""
    old = {path.relative_to(ground.before): path for path in ground.before.rglob("*")}
    files = [path for path in ground.work.rglob("*") if path.is_file() and path.stat().st_size]
    return sorted(
        path
        for path in files
        if (before := old.get(path.relative_to(ground.work))) is None
        or before.read_bytes() != path.read_bytes()
    )


def flips(ground: Ground) -> Iterator[tuple[Path, bytes]]:
    chance, files = random.Random(SEED), newest_files(ground)
    weights = [path.stat().st_size for path in files]
    for path in chance.choices(files, weights=weights, k=FLIPS):
        data = bytearray(path.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        yield path, bytes(data)


def cuts(ground: Ground) -> Iterator[tuple[Path, bytes]]:
    for path in newest_files(ground):
        data = path.read_bytes()
        for part in range(CUTS):
            kept = data[: len(data) * part // CUTS]
            yield path, kept
            yield path, kept.ljust(len(data), b"\0")


TESTS: Mapping[str, Callable[[Ground], Outcomes]] = {
    "kill -9 at each call": killed,
    "ENOSPC": full,
    "EIO": broken,
    "file size limit": limited,
    "write claims 7 bytes": claimed,
    "power loss": without_power,
    "two writers": together,
    f"{FLIPS} flipped bits": functools.partial(damaged, changes=flips),
    "cut or zeroed": functools.partial(damaged, changes=cuts),
}


def cell(found: Outcomes) -> str:
    words = ("good", "noticed", "lost", "silent", "undone", "hung", "crashed")
    return ", ".join(f"{found[word]} {word}" for word in words if found[word]) or "-"


def row(name: str) -> bool:
    """Print what became of one contestant; whether nothing was ever lost."""
    sound = True
    with tempfile.TemporaryDirectory() as folder:
        ground = Ground(name, Path(folder).resolve())
        try:
            cells = []
            for title, test in TESTS.items():
                began = time.monotonic()
                found = test(ground)
                cells.append(cell(found))
                note = f"{CONTESTANTS[name].title}: {title}: {cells[-1]}"
                print(f"{note} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
                harmless = {"good", "noticed"} if "bits" in title or "cut" in title else {"good"}
                sound &= set(found) <= harmless
        finally:
            ground.close()
    print("| " + " | ".join([CONTESTANTS[name].title, *cells]) + " |", flush=True)
    return sound


def main() -> int:
    names = sys.argv[1:] or list(CONTESTANTS)
    print("| " + " | ".join(("", *TESTS)) + " |\n" + "|---" * (len(TESTS) + 1) + "|", flush=True)
    installed = [
        name
        for name in names
        if name in OWN or importlib.util.find_spec(MODULES.get(name, name)) is not None
    ]
    verdicts = {name: row(name) for name in installed}
    return 0 if all(verdicts.get(name, True) for name in OWN) else 1


if __name__ == "__main__":
    sys.exit(main())
