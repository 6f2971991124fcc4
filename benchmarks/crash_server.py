"""A process that has loaded one contestant, and forks a child for each thing to do.

Started by crashes.py, which writes one JSON object a line to its standard input. Each order is
answered at once with the child's process id; ``collect`` waits for a child and says how it ended.

    python crash_server.py CONTESTANT
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from crash_contestants import CONTESTANTS, NEW, OLD, Contestant, State

SECONDS = 20
"""Whoever takes longer hangs."""


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


def verdict(contestant: Contestant, folder: Path) -> str:
    """old, new, right (another whole one), silent, noticed (a whole one is there), or lost."""
    try:
        found = contestant.load(folder)
    except BaseException:  # noqa: BLE001 - whatever it says, it says it
        return "noticed" if _is_there(contestant, folder) else "lost"
    for word, number in (("old", OLD), ("new", NEW)):
        if same(found, contestant.state(number)):
            return word
    return "right" if any(same(found, state) for state in contestant.right()) else "silent"


def _is_there(contestant: Contestant, folder: Path) -> bool:
    for read in contestant.by_hand(folder):
        with contextlib.suppress(BaseException):
            found = read()
            if any(same(found, state) for state in contestant.right()):
                return True
    return False


def child(contestant: Contestant, order: dict[str, Any], report: socket.socket) -> None:
    """Do one thing; say what came of it."""
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    folder = Path(order["folder"])
    if order["do"] == "load":
        signal.alarm(SECONDS)
        report.send(verdict(contestant, folder).encode())
        return
    if order.get("wait"):  # for whoever traces this process
        signal.sigwait([signal.SIGUSR1])
    signal.alarm(SECONDS)
    if "limit" in order:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["limit"], resource.RLIM_INFINITY))
    try:
        contestant.save(folder, order["state"])
    except BaseException:  # noqa: BLE001 - a refusal of any kind
        report.send(b"refused")
    else:
        report.send(b"saved")


def collect(pid: int, reports: dict[int, socket.socket]) -> str:
    """The word of a child that ended, or how it was ended."""
    _, status = os.waitpid(pid, 0)
    report = reports.pop(pid)
    with report:
        said = report.recv(100).decode()
    if said:
        return said
    signalled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return {signal.SIGALRM: "hung", signal.SIGKILL: "killed"}.get(signalled, "crashed")


def answer(word: Any) -> None:
    sys.stdout.write(json.dumps(word) + "\n")
    sys.stdout.flush()


def serve(contestant: Contestant) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    reports: dict[int, socket.socket] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "collect":
            answer(collect(order["pid"], reports))
            continue
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            try:
                child(contestant, order, theirs)
            finally:
                os._exit(0)
        theirs.close()
        reports[pid] = ours
        answer(pid)


def warm_up(contestant: Contestant) -> None:
    """Save and load once, so that no child imports anything."""
    with tempfile.TemporaryDirectory() as folder:
        for number in (OLD, NEW):
            contestant.save(Path(folder), number)
        contestant.load(Path(folder))


def main() -> None:
    # What libraries print must not come between the answers.
    answers = os.dup(1)
    os.dup2(2, 1)
    contestant = CONTESTANTS[sys.argv[1]]()
    warm_up(contestant)
    sys.stdout.flush()
    os.dup2(answers, 1)
    answer("ready")
    serve(contestant)


if __name__ == "__main__":
    main()
