"""Work on a Ray cluster: one task an input file, retried when its worker dies.

Workers read the files and send results; only the driver writes. So the bytes are those of a local
run. All machines must see the same files under the same paths, and have mds-data installed.
"""

from __future__ import annotations

import importlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mds_data.preprocess.batches import Batch
from mds_data.preprocess.inputs import InputFile, TextUnit
from mds_data.preprocess.report import InputRecord
from mds_data.preprocess.source import FileBatches, Mark, Source
from mds_data.preprocess.workers import WorkerError, keep_to_one_thread

__all__ = ["RayEngine"]

Item = TypeVar("Item")
Result = TypeVar("Result")

_WAITING = 8
"""Results of a file that wait for the driver."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayEngine:
    """Tasks on a Ray cluster, or on one that is started on this machine.

    Args:
        address: Of the cluster, such as ``auto`` or ``ray://host:10001``; starts one here if None.
        tasks: Files that are worked on at once; as many as the cluster has CPUs if None.
        retries: How often a file is begun anew whose worker died.
    """

    address: str | None = None
    tasks: int | None = None
    retries: int = 3

    def run(
        self, source: Source, *, make: Callable[[], Callable[[Batch], Any]]
    ) -> Iterator[tuple[Mark, Any]]:
        """Yield each batch's mark and ``make()(batch)``, in order.

        Raises:
            WorkerError: A worker died more often than it may, or the cluster is gone.
            ImportError: Ray is not installed.
        """
        with self._cluster() as ray:
            yield from self._results(ray, source, make)

    def map(
        self, items: Iterable[Item], *, make: Callable[[], Callable[[Item], Result]]
    ) -> Iterator[Result]:
        """Yield ``make()(item)``, in order, one task an item.

        Raises:
            WorkerError: A worker died more often than it may, or the cluster is gone.
            ImportError: Ray is not installed.
        """
        with self._cluster() as ray:
            task = ray.remote(_item_result).options(max_retries=self.retries)
            function, folder = ray.put(make), str(Path.cwd())
            most = 2 * self._at_once(ray)
            waiting: deque[Any] = deque()
            for item in items:
                waiting.append(task.remote(item, function, folder))
                if len(waiting) >= most:
                    yield _answer(ray, waiting.popleft())
            while waiting:
                yield _answer(ray, waiting.popleft())

    @contextmanager
    def _cluster(self) -> Iterator[Any]:
        ray = _ray()
        started = not ray.is_initialized()
        try:
            if started:
                ray.init(address=self.address, log_to_driver=False, logging_level="warning")
            yield ray
        except ConnectionError as error:
            raise WorkerError(f"no Ray cluster answers at {self.address}: {error}") from error
        finally:
            if started:
                ray.shutdown()

    def _at_once(self, ray: Any) -> int:
        return self.tasks or max(1, int(ray.cluster_resources().get("CPU", 1)))

    def _results(
        self, ray: Any, source: Source, make: Callable[[], Callable[[Batch], Any]]
    ) -> Iterator[tuple[Mark, Any]]:
        task = ray.remote(_file_results).options(
            num_returns="streaming",
            max_retries=self.retries,
            _generator_backpressure_num_objects=_WAITING,
        )
        most = self._at_once(ray)
        function = ray.put(make)
        coming: deque[tuple[int, Any]] = deque()
        numbers = iter(range(len(source.done), len(source.files)))
        while True:
            while len(coming) < most and (number := next(numbers, None)) is not None:
                start = source.start if source.start and source.start.file == number else None
                work = _FileWork(
                    source.files[number], number, source.text_unit, source.members, start
                )
                coming.append((number, task.remote(work, function, str(Path.cwd()))))
            if not coming:
                return
            number, stream = coming.popleft()
            yield from self._file(ray, source, number, stream)

    @staticmethod
    def _file(ray: Any, source: Source, number: int, stream: Any) -> Iterator[tuple[Mark, Any]]:
        last: Mark | None = None
        try:
            for reference in stream:
                mark, result = ray.get(reference)
                if mark is None:
                    record: InputRecord = result
                    source.check_reached(number, last)
                    source.done.append(record)
                    continue
                last = mark
                if not source.is_behind(mark):
                    yield mark, result
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            raise WorkerError(
                f"a Ray worker ended without an answer while it read "
                f"{source.files[number].path}: {str(error).splitlines()[0]}"
            ) from error


@dataclass(frozen=True, slots=True)
class _FileWork:
    """What a task needs to know."""

    file: InputFile
    number: int
    text_unit: TextUnit
    members: Sequence[str] | None
    start: Mark | None


def _file_results(
    work: _FileWork, make: Callable[[], Callable[[Batch], Any]], folder: str
) -> Iterator[tuple[Mark | None, Any]]:
    """Yield the marks and results of one file, and at the end its record. Runs in a worker."""
    os.chdir(folder)
    keep_to_one_thread()
    function = make()
    batches = FileBatches(
        work.file, number=work.number, text_unit=work.text_unit, members=work.members
    )
    for mark, batch in batches:
        behind = work.start is not None and mark.batch <= work.start.batch
        yield mark, None if behind else function(batch)
    yield None, batches.record


def _item_result(item: Any, make: Callable[[], Callable[[Any], Any]], folder: str) -> Any:
    """Return the result of one item. Runs in a worker."""
    os.chdir(folder)
    keep_to_one_thread()
    return make()(item)


def _answer(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise WorkerError(
            f"a Ray worker ended without an answer: {str(error).splitlines()[0]}"
        ) from error


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ImportError("--engine ray needs Ray: pip install 'mds-data[ray]'") from None
