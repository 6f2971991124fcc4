"""Supervisors of several machines start together, and start again together."""

from __future__ import annotations

import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from mds_train.jobs import supervisor
from mds_train.jobs.lines import Line
from mds_train.jobs.supervisor import Plan, lead, serve

pytestmark = pytest.mark.timeout(60)


def free_port() -> int:
    """A port that is free, and so is the next one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1]) - 1


def plan(machine: int, *, port: int, restarts: int = 2, patience: float = 20.0) -> Plan:
    return Plan(
        machine=machine,
        machines=2,
        head="127.0.0.1",
        address="127.0.0.1",
        port=port,
        processes=1,
        fewest=2,
        restarts=restarts,
        patience_seconds=patience,
        grace_seconds=5.0,
        arguments=("run", "run.toml"),
    )


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is started in torchrun's place: a script in the returned file."""
    script = tmp_path / "program.py"

    def command(self: Plan, *, rendezvous: str, machines: int) -> list[str]:
        return [sys.executable, str(script), str(self.machine), rendezvous, str(machines)]

    monkeypatch.setattr(Plan, "torchrun", command)
    monkeypatch.setattr(supervisor, "_POLL_SECONDS", 0.05)
    return script


def both(*, port: int, restarts: int = 2) -> list[int]:
    pool = ThreadPoolExecutor(2)
    try:
        head = pool.submit(lead, plan(0, port=port, restarts=restarts))
        other = pool.submit(serve, plan(1, port=port))
        return [head.result(timeout=50), other.result(timeout=50)]
    finally:
        pool.shutdown(wait=False)


RECORD = """
import pathlib, sys
machine, rendezvous, machines = sys.argv[1:]
with open(pathlib.Path(__file__).with_name(f"starts-{machine}"), "a") as file:
    file.write(f"{rendezvous} {machines}\\n")
first = len(pathlib.Path(__file__).with_name(f"starts-{machine}").read_text().splitlines()) == 1
"""


def starts(script: Path, machine: int) -> list[list[str]]:
    path = script.with_name(f"starts-{machine}")
    return [line.split() for line in path.read_text().splitlines()]


def test_all_start_under_one_name_and_end_together(program: Path) -> None:
    program.write_text(RECORD)

    assert both(port=free_port()) == [0, 0]

    assert starts(program, 0) == starts(program, 1)
    assert [machines for _, machines in starts(program, 0)] == ["2"]


def test_a_failure_on_one_machine_starts_all_again_under_another_name(program: Path) -> None:
    # Machine 0 would go on for ever, as ranks do that wait for one that is gone.
    program.write_text(
        RECORD
        + "if first and machine == '1':\n    sys.exit(9)\n"
        + "if first:\n    import time; time.sleep(60)\n"
    )

    assert both(port=free_port()) == [0, 0]

    assert starts(program, 0) == starts(program, 1)
    (one, _), (other, _) = starts(program, 0)
    assert one != other


def test_it_gives_up_after_so_many_restarts(program: Path) -> None:
    program.write_text(RECORD + "sys.exit(3)\n")

    assert both(port=free_port(), restarts=1) == [4, 4]

    assert len(starts(program, 0)) == 2


def test_with_too_few_machines_nothing_is_started(
    program: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert lead(plan(0, port=free_port(), patience=0.3)) == 4

    assert "only 1 of 2 machines answered" in caplog.text
    assert not program.with_name("starts-0").exists()


def test_those_that_answer_are_enough_where_that_is_allowed(program: Path) -> None:
    program.write_text(RECORD)

    alone = replace(plan(0, port=free_port(), patience=0.3), fewest=1)

    assert lead(alone) == 0
    assert [machines for _, machines in starts(program, 0)] == ["1"]


def test_a_head_that_does_not_answer_is_named(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()

    assert serve(plan(1, port=port, patience=0.3)) == 4

    assert f"Machine 0 does not answer at 127.0.0.1:{port + 1}" in caplog.text


def test_a_line_hands_on_messages_and_knows_when_the_other_end_is_gone() -> None:
    one, other = socket.socketpair()
    line, far = Line(one), Line(other)

    far.send(machine=3)
    far.send()  # a beat is no message

    assert line.received(wait_seconds=5.0) == {"machine": 3}
    assert line.received(wait_seconds=0.01) == {}
    assert line.is_alive
    far.close()
    assert line.received(wait_seconds=0.5) == {}
    assert not line.is_alive
    line.close()


def test_the_last_word_counts_though_machine_0_hangs_up_at_once() -> None:
    one, other = socket.socketpair()
    line, far = Line(one), Line(other)

    far.send(done=True)
    far.close()
    while line.is_alive:  # until the end of the line has been noticed
        threading.Event().wait(0.01)

    assert supervisor._obey(line, plan(1, port=1)) == 0


def test_a_machine_that_calls_in_as_the_roll_ends_is_hung_up_on() -> None:
    roll = supervisor._Roll.open(plan(0, port=(port := free_port())))
    connection = socket.create_connection(("127.0.0.1", port + 1))
    roll.close()

    line = Line(connection)
    line.send(machine=1)

    assert line.received(wait_seconds=10.0) == {}
    assert not line.is_alive


@pytest.mark.parametrize("garbage", [b"no json\n", b"[1]\n", b"x" * 10_000])
def test_what_is_no_message_ends_a_line(garbage: bytes) -> None:
    one, other = socket.socketpair()
    line = Line(one)

    other.sendall(garbage)

    assert line.received(wait_seconds=0.5) == {}
    assert not line.is_alive
    line.close()
    other.close()


def test_the_command_is_torchrun_s_with_the_addresses_of_the_network() -> None:
    words = plan(1, port=29400).torchrun(rendezvous="start-0", machines=2)

    assert "--rdzv-endpoint=127.0.0.1:29400" in words
    assert "--rdzv-conf=is_host=0" in words
    assert "--local-addr=127.0.0.1" in words
    assert words[-4:] == ["-m", "mds_train", "run", "run.toml"]
