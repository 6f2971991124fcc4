from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mds_train.errors import ExitCode, LostRankError, describe
from mds_train.ranks.whereabouts import (
    Place,
    Whereabouts,
    find_lost,
    lost_sentence,
    read_places,
)

HERE = Place(rank=0, step=7, doing="update", count=40, time=100.0, pid=os.getpid(), host="here")


@pytest.fixture
def dead_pid() -> int:
    """Of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def lost_of(folder: Path, *, world_size: int) -> list[Place]:
    """Whom rank 0 takes for lost."""
    return find_lost(read_places(folder, here=HERE, world_size=world_size), here=HERE)


def put(folder: Path, place: Place) -> Place:
    (folder / f"rank-{place.rank}.where").write_text(json.dumps(asdict(place)))
    return place


def test_a_rank_that_is_gone_is_named_before_those_behind(tmp_path: Path, dead_pid: int) -> None:
    put(tmp_path, replace(HERE, rank=1, count=10))
    gone = put(tmp_path, replace(HERE, rank=2, count=39, doing="save", pid=dead_pid))

    assert lost_of(tmp_path, world_size=3) == [gone]
    sentence = lost_sentence([gone], here=HERE, now=130.0)
    assert sentence == (
        f"Rank 0 could not go on with the update of step 7: rank 2 (process {dead_pid} on here) is "
        f"gone, last seen in the save of step 7. `mds-train resume RUN_DIR` goes on from the "
        f"newest checkpoint."
    )


def test_without_one_that_is_gone_the_furthest_behind_are_named(tmp_path: Path) -> None:
    put(tmp_path, replace(HERE, rank=1, count=40))
    put(tmp_path, replace(HERE, rank=2, count=39))
    stuck = put(tmp_path, replace(HERE, rank=3, count=20, step=4, doing="validation"))

    assert lost_of(tmp_path, world_size=4) == [stuck]
    assert "has not moved for 30 s, in the validation of step 4" in lost_sentence(
        [stuck], here=HERE, now=130.0
    )


def test_who_has_ended_itself_is_not_lost_nor_is_a_torn_file(tmp_path: Path, dead_pid: int) -> None:
    put(tmp_path, replace(HERE, rank=1, count=3, doing="ended", pid=dead_pid))
    (tmp_path / "rank-2.where").write_text('{"rank": 2, "st')

    assert lost_of(tmp_path, world_size=4) == []
    assert "no rank is known to be behind" in lost_sentence([], here=HERE, now=1.0)


def test_a_stopped_process_is_named_though_it_is_not_behind(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        put(tmp_path, replace(HERE, rank=1))
        stopped = put(tmp_path, replace(HERE, rank=2, count=50, pid=process.pid))

        found = lost_of(tmp_path, world_size=3)
        sentence = lost_sentence(found, here=HERE, now=130.0)
        process.send_signal(signal.SIGCONT)
        process.kill()

    assert found == [stopped]
    assert "has not moved for 30 s and is stopped, in the update of step 7" in sentence


def fail(run_dir: Path, error: Exception, *, other: Place | None = None) -> None:
    """Rank 0 of 2 fails in the update of step 3."""
    with Whereabouts(run_dir, rank=0, world_size=2) as where, where.explaining():
        if other is not None:
            put(run_dir / "logs", other)
        where.at("update", step=3)
        raise error


def test_torchs_error_becomes_one_that_names_the_rank(tmp_path: Path, dead_pid: int) -> None:
    torchs = RuntimeError("[gloo/pair.cc:538] Connection closed by peer [127.0.0.1]:1")
    dead = replace(HERE, rank=1, pid=dead_pid, host=os.uname().nodename)

    with pytest.raises(LostRankError, match=r"rank 1 .* is gone") as caught:
        fail(tmp_path, torchs, other=dead)

    assert "could not go on with the update of step 3" in str(caught.value)
    assert describe(caught.value).code == ExitCode.ENVIRONMENT
    own = json.loads((tmp_path / "logs" / "rank-0.where").read_text())
    assert own["doing"] == "ended"


def test_other_errors_and_single_processes_are_left_alone(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^shapes differ$"):
        fail(tmp_path, RuntimeError("shapes differ"))

    with Whereabouts(tmp_path / "alone", rank=0, world_size=1) as where:
        where.at("update", step=1)
    assert not (tmp_path / "alone").exists()


def test_the_file_is_written_over_in_place_and_always_whole(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "rank-0.where"
    with Whereabouts(tmp_path, rank=0, world_size=2) as where:
        where.at("forward and backward", step=123456)
        first = path.stat()
        where.at("save", step=7)

        assert (path.stat().st_ino, path.stat().st_size) == (first.st_ino, first.st_size)
        assert json.loads(path.read_text())["doing"] == "save"
