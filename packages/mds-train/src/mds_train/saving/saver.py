"""One save after another: written, committed, copied to the second place; if asked, meanwhile.

A save has three phases. All ranks write their files; rank 0 commits; rank 0 copies. Threads do the
work and touch no collective: the ranks agree from step to step (`mds_train.interruption`) that all
of them are done, and only then take the next phase together. So a failure in a thread of one rank
becomes the same exception on all, at a step, and a checkpoint counts only after its commit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mds_ckpt import commit
from mds_ckpt.formats.mds import rank_file_name
from mds_ckpt.protection.sealed_save import SealedPlace, SealedSave
from mds_train.assembly import Parts
from mds_train.errors import in_words
from mds_train.exchange import attempt_on_all
from mds_train.save import Snapshot, publish_snapshot, take_snapshot, write_snapshot
from mds_train.saving.backup import back_up
from mds_train.saving.sealing import new_sealing
from mds_train.state import TrainState

__all__ = ["Notify", "Saver"]


class Notify(Protocol):
    """Tells the run's watchers of an event, on every rank."""

    def __call__(self, event: str, message: str, **details: object) -> None:
        """Tell of ``event`` in a sentence; details are what JSON can hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    """Where the ranks write."""

    partial: Path
    places: tuple[SealedPlace, ...] | None = None
    """Each rank's encrypted file and its key; None where the files are plain."""


@dataclass(kw_only=True, slots=True)
class _Job:
    """A save under way."""

    snapshot: Snapshot
    stage: _Stage
    phase: str
    work: Future[Any]
    """This rank's part of the phase."""
    began: float
    stall: float = 0.0
    """Seconds that the loop stood still for it."""
    why: str = ""
    lock: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    sealing: SealedSave | None = None
    """On the first rank, what encrypts the checkpoint."""
    folder: Path | None = None


class Saver:
    """Writes checkpoints of one run. What is not said to be local is collective.

    Args:
        parts: The run.
        parent: Path, uuid and datasets of the checkpoint that the run started from.
        newest: This run's newest checkpoint so far.
        notify: Is told of finished saves and copies.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        parent: Mapping[str, Any] | None,
        newest: Path | None,
        notify: Notify,
    ) -> None:
        self._parts = parts
        self._parent = parent
        self._notify = notify
        self._settings = parts.config.checkpoint
        self._first = parts.groups.rank == 0
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._job: _Job | None = None
        self._newest = newest
        self._last_step = None if newest is None else int(newest.name.removeprefix("step-"))

    @property
    def newest(self) -> Path | None:
        """The newest committed checkpoint. Local."""
        return self._newest

    @property
    def is_working(self) -> bool:
        """Whether this rank's threads are busy. Local."""
        return self._job is not None and not self._job.work.done()

    def save(self, state: TrainState, *, why: str = "") -> None:
        """Save this moment, unless it has been saved; return when it may go on.

        Args:
            state: The run's counters, right after a step.
            why: What asked for it, for the message; empty for the plan.

        Raises:
            OSError: On all ranks, if one could not write; earlier checkpoints are untouched.
        """
        if self._last_step == state.iteration:
            return
        began = time.perf_counter()
        waited = self._wait_for_earlier()
        self._start(state, began=began, why=why)
        if not self._settings.async_save:
            while self._job is not None and self._job.phase != "copy":
                self.advance()
            return
        assert self._job is not None
        self._job.stall = time.perf_counter() - began
        if waited > 0.01:
            message = f"The save at step {state.iteration} waited {waited:.2f} s for the one before"
            self._notify("save-wait", f"{message}.", seconds=waited)

    def advance(self) -> None:
        """Take the next phase of the save under way. All ranks' threads should be done."""
        job = self._job
        if job is None:
            return
        if job.phase == "copy":
            self._end_copy(job)
            return
        with self._giving_up_together(job):
            outcomes = attempt_on_all(job.work.result)
        if job.phase == "write":
            job.phase = "commit"
            job.work = self._on_first(lambda: self._commit(job, outcomes))
        else:
            self._end_commit(job, outcomes[0])

    def finish(self) -> None:
        """Wait for the save under way and its copy."""
        while self._job is not None:
            self.advance()

    def close(self) -> None:
        """Let go of threads and locks, whatever happened. Local.

        A save that has not been committed stays a partial folder, which the next save removes.
        """
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._job is not None:
            self._job.lock.close()
            self._job = None

    def _wait_for_earlier(self) -> float:
        """Never two saves at once: that would need twice the memory, and one disk is not faster."""
        began = time.perf_counter()
        self.finish()
        return time.perf_counter() - began

    def _start(self, state: TrainState, *, began: float, why: str) -> None:
        lock = contextlib.ExitStack()
        sealings: list[SealedSave | None] = []
        try:
            stage = attempt_on_all(lambda: self._stage(state, lock, sealings))[0]
            assert stage is not None
            snapshot = self._snapshot(state)
        except BaseException:
            lock.close()
            raise
        rank = self._parts.groups.rank
        place = None if stage.places is None else stage.places[rank]
        work = self._begin(lambda: write_snapshot(snapshot, stage.partial, rank=rank, place=place))
        self._last_step = state.iteration
        self._job = _Job(
            snapshot=snapshot,
            stage=stage,
            sealing=sealings[0] if sealings else None,
            phase="write",
            work=work,
            began=began,
            why=why,
            lock=lock,
        )

    def _stage(
        self, state: TrainState, lock: contextlib.ExitStack, sealings: list[SealedSave | None]
    ) -> _Stage | None:
        """Rank 0 keeps other jobs out of the folder, from here to the commit."""
        if not self._first:
            return None
        root = self._parts.checkpoints
        commit.make_folders(root)
        lock.enter_context(commit.lock(root))
        partial = commit.stage(root, state.iteration)
        sealing = new_sealing(self._settings)
        sealings.append(sealing)
        if sealing is None:
            return _Stage(partial=partial)
        ranks = range(self._parts.groups.layout.world_size)
        places = tuple(sealing.place(rank_file_name(rank)) for rank in ranks)
        return _Stage(partial=partial, places=places)

    def _snapshot(self, state: TrainState) -> Snapshot:
        copied = self._settings.async_save
        taken: list[Snapshot] = []
        try:
            attempt_on_all(lambda: taken.append(take_snapshot(self._parts, state, copied=copied)))
        except (OSError, ValueError, RuntimeError):
            self._clean()
            raise
        return taken[0]

    def _commit(self, job: _Job, files: list[Any]) -> Path:
        folder = publish_snapshot(
            self._parts,
            job.snapshot,
            partial=job.stage.partial,
            files=files,
            parent=self._parent,
            sealing=job.sealing,
        )
        keep = self._settings
        if keep.keep_last:
            commit.prune(folder.parent, keep_last=keep.keep_last, keep_every=keep.keep_every)
        return folder

    def _end_commit(self, job: _Job, folder: Path) -> None:
        job.lock.close()
        self._newest = job.folder = folder
        seconds = time.perf_counter() - job.began
        stall = job.stall if self._settings.async_save else seconds
        why = f" ({job.why})" if job.why else ""
        meanwhile = f", {stall:.2f} s of it standing still" if self._settings.async_save else ""
        self._notify(
            "save",
            f"Saved {folder} in {seconds:.2f} s{meanwhile}{why}.",
            path=str(folder),
            seconds=seconds,
            stall_seconds=stall,
            saved_step=job.snapshot.state.iteration,
        )
        if self._settings.backup is None:
            self._job = None
            return
        job.phase, job.began = "copy", time.perf_counter()
        # Copying to a slow place need not keep the run waiting; only the next save waits for it.
        job.work = (
            self._threads.submit(
                back_up,
                folder,
                self._settings.backup,
                keep_last=self._settings.keep_last,
                keep_every=self._settings.keep_every,
                identity=self._settings.backup_identity,
            )
            if self._first
            else _done(lambda: None)
        )

    def _end_copy(self, job: _Job) -> None:
        """A copy that failed is said aloud, but it ends no run: the checkpoint itself is whole."""
        self._job = None
        name = "" if job.folder is None else job.folder.name
        try:
            copy = attempt_on_all(job.work.result)[0]
        except (OSError, ValueError, RuntimeError) as error:
            reason = in_words(error) if isinstance(error, OSError) else str(error)
            message = (
                f"{name} was not copied to {self._settings.backup}: {reason.rstrip('.')}. "
                f"The checkpoint itself is whole; the next one is copied again."
            )
            self._notify("backup-failed", message, place=self._settings.backup)
            return
        seconds = time.perf_counter() - job.began
        self._notify(
            "backup",
            f"Copied {name} to {copy} in {seconds:.2f} s.",
            path=str(copy),
            seconds=seconds,
        )

    def _on_first(self, action: Callable[[], Any]) -> Future[Any]:
        return self._begin(action) if self._first else _done(lambda: None)

    def _begin(self, action: Callable[[], Any]) -> Future[Any]:
        return self._threads.submit(action) if self._settings.async_save else _done(action)

    @contextlib.contextmanager
    def _giving_up_together(self, job: _Job) -> Any:
        try:
            yield
        except (OSError, ValueError, RuntimeError):
            self._job = None
            self._last_step = None
            self._clean()
            job.lock.close()
            raise

    def _clean(self) -> None:
        """Leave nothing of a save that failed; the lock is still held."""
        if self._first:
            with contextlib.suppress(OSError):
                commit.clean(self._parts.checkpoints)


def _done(action: Callable[[], Any]) -> Future[Any]:
    """Do it now, in the form that a thread would give."""
    future: Future[Any] = Future()
    try:
        future.set_result(action())
    except (OSError, ValueError, RuntimeError) as error:
        future.set_exception(error)
    return future
