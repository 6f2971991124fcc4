"""Where each rank is, in one small file a rank, for the moment when one of them is lost.

A collective that fails says that a connection was closed or that it waited too long; it does not
say for whom. So every rank writes into ``RUN_DIR/logs/rank-N.where`` what it is about to do, some
ten times a step, and whoever fails reads the others' files: who is gone, who is behind, in which
step, doing what.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from mds_train.errors import LostRankError, is_lost_rank

__all__ = ["Place", "Whereabouts", "find_gone", "find_lost", "lost_sentence", "read_places"]

_LOOKS, _PAUSE = 50, 0.1
"""How often to look for a lost rank, and the seconds between: a killed process takes a moment to
be gone, and the others fail about when this one does."""
_WIDTH = 256
"""Bytes of a file: it is written over in place, so a reader never sees half of it for long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a rank was when it last wrote."""

    rank: int
    step: int
    doing: str
    """"forward and backward", "update", ...; "ended" when it has ended itself."""
    count: int
    """How many places it has been to; all ranks go the same way."""
    time: float
    pid: int
    host: str


class Whereabouts:
    """This rank's file, and a look at the others' when something fails.

    Args:
        run_dir: Folder of the run, which all ranks see.
        rank: This rank.
        world_size: How many there are; one alone writes nothing.
    """

    def __init__(self, run_dir: Path, *, rank: int, world_size: int) -> None:
        self._folder = run_dir / "logs"
        self._world_size = world_size
        self._descriptor = -1
        self._place = Place(
            rank=rank,
            step=0,
            doing="start",
            count=0,
            time=time.time(),
            pid=os.getpid(),
            host=socket.gethostname(),
        )

    def __enter__(self) -> Self:
        if self._world_size > 1:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = _path(self._folder, self._place.rank)
            path.unlink(missing_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            self._write()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._descriptor >= 0:
            self.at("ended", step=self._place.step)
            os.close(self._descriptor)
            self._descriptor = -1

    def at(self, doing: str, *, step: int) -> None:
        """Say what comes now."""
        place = self._place
        self._place = replace(
            place, step=step, doing=doing, count=place.count + 1, time=time.time()
        )
        self._write()

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Turn the failure of a collective into a sentence that names rank, work and step.

        Raises:
            LostRankError: In place of torch's error.
        """
        try:
            yield
        except (RuntimeError, OSError) as error:
            if self._world_size == 1 or not is_lost_rank(error):
                raise
            here = self._place
            self.at("ended", step=here.step)  # whoever fails next must not take this rank for lost
            lost = self._look(here)
            sentence = lost_sentence(lost, here=here, now=time.time())
            first = str(error).strip().splitlines()[0]
            raise LostRankError(f"{sentence} ({first})") from error

    def _look(self, here: Place) -> list[Place]:
        """Find the lost ranks; others that fail as this one does get a moment to say so."""
        for _ in range(_LOOKS):
            places = read_places(self._folder, here=here, world_size=self._world_size)
            if find_gone(places, here=here) or all(place.doing == "ended" for place in places):
                break
            time.sleep(_PAUSE)
        return find_lost(places, here=here)

    def _write(self) -> None:
        if self._descriptor < 0:
            return
        text = json.dumps(asdict(self._place))[: _WIDTH - 1]
        with contextlib.suppress(OSError):  # a full disk must not end a run here
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            os.write(self._descriptor, f"{text:<{_WIDTH - 1}}\n".encode())


def read_places(folder: Path, *, here: Place, world_size: int) -> list[Place]:
    """Where the other ranks are; those whose file is not there yet are left out."""
    return [
        place
        for rank in range(world_size)
        if rank != here.rank and (place := _read(_path(folder, rank))) is not None
    ]


def find_gone(places: Sequence[Place], *, here: Place) -> list[Place]:
    """The ranks of this machine whose process has died or stopped before it could say so."""
    return [
        place
        for place in places
        if place.doing != "ended" and place.host == here.host and _state(place.pid) != "running"
    ]


def find_lost(places: Sequence[Place], *, here: Place) -> list[Place]:
    """The ranks that are gone, or else those that are furthest behind; none if nobody is.

    Args:
        places: Of the other ranks.
        here: Where this rank failed.
    """
    if gone := find_gone(places, here=here):
        return gone
    behind = [place for place in places if place.doing != "ended" and place.count <= here.count]
    furthest = min((place.count for place in behind), default=0)
    return [place for place in behind if place.count == furthest]


def lost_sentence(lost: list[Place], *, here: Place, now: float) -> str:
    """Say it for people."""
    own = f"Rank {here.rank} could not go on with the {here.doing} of step {here.step}"
    remedy = "`mds-train resume RUN_DIR` goes on from the newest checkpoint."
    if not lost:
        return (
            f"{own}: a collective failed, and no rank is known to be behind; where all say so, "
            f"look at the network between the machines. {remedy}"
        )
    names = " and ".join(_describe(place, here=here, now=now) for place in lost[:3])
    more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    return f"{own}: {names}{more}. {remedy}"


def _describe(place: Place, *, here: Place, now: float) -> str:
    where = f"rank {place.rank} (process {place.pid} on {place.host})"
    last = f"in the {place.doing} of step {place.step}"
    state = _state(place.pid) if place.host == here.host else "running"
    if state == "gone":
        return f"{where} is gone, last seen {last}"
    stopped = " and is stopped" if state == "stopped" else ""
    return f"{where} has not moved for {now - place.time:.0f} s{stopped}, {last}"


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.where"


def _read(path: Path) -> Place | None:
    try:
        return Place(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None  # not begun yet, or written this very moment


def _state(pid: int) -> str:
    """Whether a process of this machine is "running", "stopped" or "gone"."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        return "running"
    with contextlib.suppress(OSError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        letter = stat.rpartition(")")[2].split()[0]
        # A killed child that nobody has waited for yet is no more either.
        return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(letter, "running")
    return "running"
