"""Map batches to results in worker processes: in order, with few in flight, and no orphans.

The pool of `multiprocessing` reads its whole input ahead, which is how preprocessing used to fill
the memory; here at most two batches a worker wait.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache, partial
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from typing import Any, TypeVar

__all__ = ["WorkerError", "check_guarded", "keep_to_one_thread", "map_in_order"]

Item = TypeVar("Item")
Result = TypeVar("Result")


_GUARD = "`if __name__ == '__main__':`"


class WorkerError(OSError):
    """A worker process died."""


def check_guarded() -> None:
    """Raise RuntimeError in a worker that only reads its parent's script, and so begins it anew."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(f"a worker process began the script anew: put the call under {_GUARD}")


def map_in_order(
    items: Iterable[Item],
    *,
    make: Callable[[], Callable[[Item], Result]],
    workers: int,
    here: Callable[[Item], bool] | None = None,
) -> Iterator[Result]:
    """Yield ``make()(item)`` for each item, in order.

    Args:
        items: Read only as far as the workers need.
        make: Builds the function; called once in each worker, so it must be picklable.
        workers: Processes; with 1 everything happens in this one.
        here: Says which items are too large to be sent: this process works on them, and reads no
            further meanwhile.

    Raises:
        WorkerError: A worker died (it was killed, most likely for want of memory).
    """
    if workers <= 1:
        yield from map(make(), items)
        return
    executor = ProcessPoolExecutor(
        workers,
        mp_context=_context(make),
        initializer=_start_worker,
        initargs=(make,),
    )
    try:
        yield from _in_order(executor, items, most=2 * workers, make=make, here=here)
    except BrokenProcessPool as error:
        raise WorkerError(
            "a worker process ended without an answer. Either it wanted too much memory: use fewer "
            f"workers. Or a script of yours calls this outside of {_GUARD}: workers read scripts."
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _context(make: Callable[[], object]) -> BaseContext:
    """How workers are started.

    A fork of this process would inherit the tokenizer's threads in whatever state they were. A
    server that has done nothing but import can be forked, so that many workers import once.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    function = make.func if isinstance(make, partial) else make
    context.set_forkserver_preload([function.__module__])
    return context


def _in_order(
    executor: ProcessPoolExecutor,
    items: Iterable[Item],
    *,
    most: int,
    make: Callable[[], Callable[[Item], Any]],
    here: Callable[[Item], bool] | None,
) -> Iterator[Any]:
    waiting: deque[Future[Any]] = deque()
    function = cache(make)
    for item in items:
        if here is not None and here(item):
            while waiting:
                yield waiting.popleft().result()
            yield function()(item)
            continue
        waiting.append(executor.submit(_work, item))
        if len(waiting) >= most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def keep_to_one_thread() -> None:
    """Let the tokenizers library start no threads: one process is one core here.

    Set for the library only (it asks the C environment at each call), and for this process's life.
    """
    os.putenv("TOKENIZERS_PARALLELISM", "false")


class _Worker:
    """The function of this worker process."""

    function: Callable[[Any], Any]


def _start_worker(make: Callable[[], Callable[[Any], Any]]) -> None:
    # Ctrl-C reaches the whole group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_to_one_thread()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _Worker.function = staticmethod(make())


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _work(item: Any) -> Any:
    return _Worker.function(item)
