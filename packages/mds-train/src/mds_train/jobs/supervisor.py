"""Keeps a run of several machines going: who answers starts together, and starts again together.

    python -m mds_train.jobs.supervisor --machine 0 --machines 2 --head A --address A -- run ...

Every machine runs it; `mds-train launch --launcher torchrun` writes the script. Machine 0 calls the
roll. Those that answer start torchrun under a new rendezvous id; when one of them fails or falls
silent, all stop, the roll is called again, and the run goes on from its newest checkpoint on the
machines that answer then, with the same global batch. torchrun's own elastic restart would lose the
job when a machine that was cut off comes back.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mds_train.errors import ExitCode
from mds_train.jobs.lines import Line

__all__ = ["Plan", "lead", "main", "serve"]

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_STOP_SECONDS = 60.0
"""What torchrun has to end before it is killed; it gives its ranks half of that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What every machine knows from the start."""

    machine: int
    machines: int
    head: str
    """Address of machine 0 in the training network."""
    address: str
    """Address of this machine there."""
    port: int
    """Of the rendezvous; the roll is called on the next one."""
    processes: int
    fewest: int
    """Machines without which the run does not go on."""
    restarts: int
    patience_seconds: float
    """How long machines are waited for when the roll is called."""
    grace_seconds: float
    """How long the ranks may take to end by themselves, with their message, when one is lost."""
    arguments: tuple[str, ...]
    """Of mds-train."""

    def torchrun(self, *, rendezvous: str, machines: int) -> list[str]:
        """The command of one start on this machine."""
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            f"--nnodes={machines}",
            f"--nproc-per-node={self.processes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.head}:{self.port}",
            f"--rdzv-id={rendezvous}",
            # Without it nobody opens the store where a machine has several names.
            f"--rdzv-conf=is_host={int(self.machine == 0)}",
            f"--local-addr={self.address}",
            "--max-restarts=0",
            *("-m", "mds_train", *self.arguments),
        ]


@dataclass(slots=True)
class _Roll:
    """The machines that have called in, by number; filled by a thread for as long as it lives."""

    listener: socket.socket
    lines: dict[int, Line] = field(default_factory=dict)
    _changing: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False

    @classmethod
    def open(cls, plan: Plan) -> _Roll:
        roll = cls(socket.create_server((plan.address, plan.port + 1), backlog=plan.machines))
        threading.Thread(target=roll._accept, daemon=True).start()
        return roll

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                line = Line(self.listener.accept()[0])
                machine = line.received(wait_seconds=5.0).get("machine")
                if not isinstance(machine, int) or not self._take(machine, line):
                    line.close()

    def _take(self, machine: int, line: Line) -> bool:
        """Whether there is still a roll that the machine can be on."""
        with self._changing:
            if self._is_closed:
                return False
            if machine in self.lines:  # it was cut off, and is back
                self.lines[machine].close()
            self.lines[machine] = line
            return True

    def present(self) -> dict[int, Line]:
        """Those that are there now."""
        return {m: line for m, line in list(self.lines.items()) if line.is_alive}

    def close(self) -> None:
        self.listener.close()
        with self._changing:
            self._is_closed = True
            for line in self.lines.values():
                line.close()


def lead(plan: Plan) -> int:
    """Call the roll, start, and start again; on machine 0."""
    roll = _Roll.open(plan)
    try:
        for attempt in range(plan.restarts + 1):
            others = _called(roll, plan)
            if len(others) + 1 < plan.fewest:
                return _give_up(
                    roll, f"only {len(others) + 1} of {plan.machines} machines answered"
                )
            rendezvous = f"start-{attempt}-{secrets.token_hex(4)}"
            size = len(others) + 1
            logger.warning("Start %d on %d machines (%s).", attempt, size, rendezvous)
            for line in others.values():
                line.send(start=rendezvous, machines=size)
            code = _run_until(
                plan.torchrun(rendezvous=rendezvous, machines=size),
                lost=functools.partial(_lost, others),
                grace_seconds=plan.grace_seconds,
            )
            if code == ExitCode.DONE:
                for line in roll.present().values():
                    line.send(done=True)
                return ExitCode.DONE
            for line in roll.present().values():
                line.send(stop=rendezvous)
            logger.warning("Start %d ended with code %d.", attempt, code)
        return _give_up(roll, f"gave up after {plan.restarts} restarts")
    finally:
        roll.close()


def _give_up(roll: _Roll, why: str) -> int:
    for line in roll.present().values():
        line.send(done=False)
    logger.error("The job ended: %s. The checkpoints are untouched.", why)
    return ExitCode.ENVIRONMENT


def _called(roll: _Roll, plan: Plan) -> dict[int, Line]:
    """The machines that answer; all of them sooner than after the whole patience.

    That one was heard of before the call says nothing: its link may have been cut just now.
    """
    began = time.monotonic()
    answered: dict[int, Line] = {}
    while time.monotonic() < began + plan.patience_seconds:
        answered = {m: line for m, line in roll.present().items() if line.heard_since(began)}
        if len(answered) + 1 >= plan.machines:
            break
        time.sleep(_POLL_SECONDS)
    return answered


def _lost(others: dict[int, Line]) -> str:
    """Say which machine has failed or fallen silent."""
    for machine, line in others.items():
        message = line.received(wait_seconds=0.01)
        if (code := message.get("failed")) is not None:
            return f"machine {machine} failed with code {code}"
        if not message and not line.is_alive:
            return f"machine {machine} has not been heard of"
    return ""


def serve(plan: Plan) -> int:
    """Do what machine 0 says; on the others."""
    deadline = time.monotonic() + plan.patience_seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((plan.head, plan.port + 1), timeout=5.0)
            ended = _obey(Line(connection), plan)
            if ended is not None:
                return ended
            logger.warning("Machine 0 is out of reach; calling again.")
            # It may be away for as long as it waits for machines itself.
            deadline = time.monotonic() + plan.patience_seconds + plan.grace_seconds
        time.sleep(_POLL_SECONDS)
    logger.error(
        "Machine 0 does not answer at %s:%d; look whether it runs and whether the port is open.",
        plan.head,
        plan.port + 1,
    )
    return ExitCode.ENVIRONMENT


def _obey(line: Line, plan: Plan) -> int | None:
    """Start and stop as told; the job's exit code, or None if the line went dead."""
    line.send(machine=plan.machine)
    try:
        while True:
            message = line.received(wait_seconds=_POLL_SECONDS)
            if "done" in message:
                return ExitCode.DONE if message["done"] else ExitCode.ENVIRONMENT
            # Only now: machine 0 hangs up right after its last word.
            if not message and not line.is_alive:
                return None
            if "start" not in message:
                continue
            rendezvous, machines = str(message["start"]), int(message["machines"])
            told: list[dict[str, object]] = []
            code = _run_until(
                plan.torchrun(rendezvous=rendezvous, machines=machines),
                lost=functools.partial(_stopped, line, told),
                grace_seconds=plan.grace_seconds,
            )
            if told and "done" in told[-1]:
                return ExitCode.DONE if told[-1]["done"] else ExitCode.ENVIRONMENT
            if code != ExitCode.DONE:
                line.send(failed=code)
    finally:
        line.close()


def _stopped(line: Line, told: list[dict[str, object]]) -> str:
    message = line.received(wait_seconds=0.01)
    if "stop" in message or "done" in message:
        told.append(message)
        return "machine 0 has ended this start"
    return "" if message or line.is_alive else "machine 0 has not been heard of"


def _run_until(command: Sequence[str], *, lost: Callable[[], str], grace_seconds: float) -> int:
    """Run a command; when something is lost, give it time to end by itself, then end it."""
    process = subprocess.Popen(list(command))
    deadline: float | None = None
    try:
        while (code := process.poll()) is None:
            if deadline is None and (why := lost()):
                logger.warning("This start ends: %s.", why)
                deadline = time.monotonic() + grace_seconds
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        return _ended(process) if code is None else code
    finally:
        if process.poll() is None:
            _ended(process)


def _ended(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mds_train.jobs.supervisor",
        description=(__doc__ or "").split("\n")[0],
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--machine", type=int, required=True, metavar="N", help="0 calls the roll")
    add("--machines", type=int, required=True, metavar="N")
    add("--head", required=True, metavar="ADDRESS", help="of machine 0")
    add("--address", required=True, metavar="ADDRESS", help="of this machine")
    add("--port", type=int, default=29400, metavar="N", help="and the next one (%(default)s)")
    add("--processes", type=int, default=1, metavar="N", help="ranks a machine")
    add("--fewest", type=int, default=1, metavar="N", help="machines to go on with (%(default)s)")
    add("--restarts", type=int, default=3, metavar="N", help="(%(default)s)")
    add("--patience", type=float, default=120.0, metavar="S", help="for machines (%(default)s)")
    add("--grace", type=float, default=360.0, metavar="S", help="for ranks to end (%(default)s)")
    add("arguments", nargs="+", metavar="-- ARGUMENTS", help="of mds-train")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Supervise this machine until the job ends; its exit code."""
    options = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.WARNING, format=f"[%(asctime)s machine {options.machine}] %(message)s"
    )
    plan = Plan(
        machine=options.machine,
        machines=options.machines,
        head=options.head,
        address=options.address,
        port=options.port,
        processes=options.processes,
        fewest=options.fewest,
        restarts=options.restarts,
        patience_seconds=options.patience,
        grace_seconds=options.grace,
        arguments=tuple(options.arguments),
    )
    # A signal to end reaches the ranks, which save, through the `finally` around them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.ENVIRONMENT))
    return lead(plan) if plan.machine == 0 else serve(plan)


if __name__ == "__main__":
    sys.exit(main())
