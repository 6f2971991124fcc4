"""A process that has run a command once, and then forks children that run it under strace.

Started by test_failing_calls, which writes one JSON object a line to its standard input and reads
two back: the child's process id, and how it ended. What a child says goes through a socket, since
its writes to files are counted.

    python command_server.py
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import socket
import sys
from typing import Any


def run(module: str, argv: list[str]) -> tuple[int, str]:
    """The exit code of a command, and what it says of an error."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        code = importlib.import_module(module).main(argv)
    return code, said.getvalue()


def child(order: dict[str, Any], report: socket.socket) -> None:
    """Wait until the tracer is there; run, and report."""
    signal.sigwait([signal.SIGUSR1])
    code, said = run(order["module"], order["argv"])
    report.send(json.dumps({"code": code, "said": said}).encode())


def answer(members: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(members) + "\n")
    sys.stdout.flush()


def serve() -> None:
    """Run what is ordered with ``warm`` here, everything else in a child."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    for line in sys.stdin:
        order = json.loads(line)
        if order["warm"]:
            answer({"code": run(order["module"], order["argv"])[0]})
            continue
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            try:
                child(order, theirs)
            finally:
                os._exit(0)
        theirs.close()
        answer({"pid": pid})
        os.waitpid(pid, 0)
        answer(json.loads(ours.recv(2**16) or b'{"code": null, "said": "a traceback"}'))
        ours.close()


if __name__ == "__main__":
    serve()
