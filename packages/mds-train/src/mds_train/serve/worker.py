"""The thread that owns the model: it steps a continuous batch, and tells those who asked."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mds_train.generate.batch import ContinuousBatch
from mds_train.generate.request import FinishReason, Request, Running, Token
from mds_train.generate.text import TextStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Busy", "Job", "Piece", "Worker"]

logger = logging.getLogger(__name__)

_Ended = FinishReason | Literal["error"]


class Busy(Exception):  # noqa: N818
    """As many requests wait as may, or the server is about to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What is new of an answer."""

    text: str = ""
    tokens: tuple[Token, ...] = ()
    prompt_tokens: tuple[Token, ...] = ()
    """With the first piece, if the prompt's likelihoods were asked for."""
    finish_reason: _Ended | None = None
    """In the last piece."""


class Job:
    """One sequence that was asked for.

    Args:
        request: What to continue.
        stream: Makes its text.
        listener: Is given each piece, in the worker's thread; it must not wait.
    """

    def __init__(
        self, request: Request, stream: TextStream, listener: Callable[[Piece], None]
    ) -> None:
        self.request, self.stream, self.listener = request, stream, listener
        self.running: Running | None = None
        self.cancelled = False
        self.told = 0


class Worker:
    """Runs jobs until it is stopped.

    Args:
        batch: The sequences' slots; this thread alone touches it.
        tokenizer: Of the model.
        most_waiting: Jobs that may wait while all slots are taken.
    """

    def __init__(self, batch: ContinuousBatch, tokenizer: Tokenizer, *, most_waiting: int) -> None:
        self._batch, self._tokenizer = batch, tokenizer
        self._most_waiting = most_waiting
        self._wake = threading.Condition()
        self._arrived: list[Job] = []
        self._calls: list[Callable[[], None]] = []
        self._jobs: list[Job] = []
        self._stopping = False
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._run, name="mds-serve-worker", daemon=True)
        self.failure: str | None = None
        """Why the model cannot answer any more."""

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def stop(self, *, grace_seconds: float) -> None:
        """Take no more jobs, give those that run some time, and wait for the thread."""
        with self._wake:
            self._stopping = True
            self._deadline = time.monotonic() + grace_seconds
            self._wake.notify()
        self._thread.join(grace_seconds + 30)

    @property
    def active(self) -> int:
        """Sequences that get tokens now."""
        return self._batch.active

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot."""
        return self._batch.waiting + len(self._arrived)

    @property
    def max_length(self) -> int:
        """Most tokens of a sequence."""
        return self._batch.max_length

    def check(self, request: Request) -> None:
        """Raise ValueError if a request does not fit the model."""
        self._batch.check(request)

    def submit(
        self,
        asked: list[tuple[Request, tuple[str, ...]]],
        listener: Callable[[int, Piece], None],
    ) -> list[Job]:
        """Queue sequences, all or none.

        Args:
            asked: requests with the strings at which they stop.
            listener: is given the number of the request and each of its pieces.

        Raises:
            Busy: If too many wait already, or the server is about to end.
            ValueError: If one does not fit the model, or they would be too many for an idle server.
        """
        for request, _ in asked:
            self.check(request)
        most = self._most_waiting + self._batch.slots
        if len(asked) > most:
            raise ValueError(
                f"The request asks for {len(asked)} answers; this server takes {most} at a time."
            )
        jobs = [self._job(*each, number, listener) for number, each in enumerate(asked)]
        with self._wake:
            if self._stopping or self.failure is not None:
                raise Busy(self.failure or "The server is about to end.")
            if self.active + self.waiting + len(jobs) > most:
                raise Busy("Too many requests wait already; try again later.")
            self._arrived += jobs
            self._wake.notify()
        return jobs

    def _job(
        self,
        request: Request,
        stop: tuple[str, ...],
        number: int,
        listener: Callable[[int, Piece], None],
    ) -> Job:
        stream = TextStream(self._tokenizer, prompt=request.prompt, stop=stop)
        return Job(request, stream, lambda piece: listener(number, piece))

    def cancel(self, jobs: list[Job]) -> None:
        """End jobs that nobody listens to any more."""
        with self._wake:
            for job in jobs:
                job.cancelled = True
            self._wake.notify()

    def call(self, action: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Run something else on the model, between two steps.

        Args:
            action: what; others wait meanwhile.
            done: is given what it returned or raised, in the worker's thread.

        Raises:
            Busy: As `submit`.
        """

        def guarded() -> None:
            try:
                result = action()
            except (ValueError, RuntimeError) as error:
                result = error
            done(result)

        with self._wake:
            if self._stopping or len(self._calls) >= self._most_waiting:
                raise Busy("Too many requests wait already, or the server is about to end.")
            self._calls.append(guarded)
            self._wake.notify()

    def _run(self) -> None:
        ended = False
        try:
            self._work()
            ended = True
        except RuntimeError:  # out of memory, a lost device
            logger.exception("The model failed; the server answers no more requests.")
        finally:
            if not ended:  # whatever it was, nobody may wait for ever
                self._fail("The model failed; the server's log says how.")

    def _work(self) -> None:
        while self._take():
            if self._batch.step():
                self._tell_all()
        self._end_all("cancelled")

    def _take(self) -> bool:
        """Wait for work and take it; False at the end."""
        with self._wake:
            while not (self._arrived or self._calls or self._jobs or self._stopping):
                self._wake.wait()
            arrived, self._arrived = self._arrived, []
            calls, self._calls = self._calls, []
            overdue = time.monotonic() > self._deadline
            stopping = self._stopping
        for job in arrived:
            job.running = self._batch.add(job.request)
            self._jobs.append(job)
        for call in calls:
            call()
        for job in [job for job in self._jobs if job.cancelled]:
            self._end(job, "cancelled")
        return not overdue and not (stopping and not self._jobs)

    def _tell_all(self) -> None:
        for job in list(self._jobs):
            running = job.running
            if running is None or not (running.tokens[job.told :] or running.finish_reason):
                continue
            self._tell(job, running)

    def _tell(self, job: Job, running: Running) -> None:
        fresh = tuple(running.tokens[job.told :])
        text = "".join(job.stream.push(token.id) for token in fresh)
        first = job.told == 0
        job.told += len(fresh)
        if job.stream.stopped:
            self._batch.end(running, "stop")
        if running.finish_reason is not None:
            text += job.stream.flush()
            self._jobs.remove(job)
        reason: _Ended | None = "stop" if job.stream.stopped else running.finish_reason
        prompt = tuple(running.prompt_tokens) if first else ()
        job.listener(Piece(text=text, tokens=fresh, prompt_tokens=prompt, finish_reason=reason))

    def _end(self, job: Job, reason: FinishReason) -> None:
        if job.running is not None:
            self._batch.end(job.running, reason)
        self._jobs.remove(job)
        job.listener(Piece(finish_reason=reason))

    def _end_all(self, reason: FinishReason) -> None:
        for job in list(self._jobs):
            self._end(job, reason)

    def _fail(self, reason: str) -> None:
        with self._wake:
            self.failure = reason
            jobs, self._arrived = [*self._jobs, *self._arrived], []
            self._jobs = []
        for job in jobs:
            job.listener(Piece(finish_reason="error"))
