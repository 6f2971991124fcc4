"""What tests of all packages share: a table of tolerances, a measure of error, gloo ranks."""

import contextlib
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["TOLERANCES", "RanksFailedError", "relative_error", "run_ranks"]

TOLERANCES: Mapping[str, float] = MappingProxyType(
    {
        # A layout (tp, pp, dp, zero, schedule, recompute) against one process, three optimizer
        # steps: parameters and gradients in float64, the loss in fp32 and bf16, all relative.
        "layout_float64": 1e-10,
        "layout_loss_float32": 2e-6,
        "layout_loss_bfloat16": 2e-3,
        # fp32 logits against transformers, absolute, on random weights of standard deviation 0.2.
        "transformers_logits_float32": 1e-5,
        # fp32 losses against the golden trajectories of Megatron-DeepSpeed.
        "golden_loss_float32": 1e-6,
        # A kernel: relative L2 error against float64 at most
        # ratio x (error of the best torch composition in that dtype) + floor.
        "kernel_ratio": 1.5,
        "kernel_floor_float64": 1e-12,
        "kernel_floor_float32": 1e-6,
        "kernel_floor_float16": 5e-4,
        "kernel_floor_bfloat16": 4e-3,
    }
)
"""The tolerances of every test, by name; a mirror of the project's page on numerics."""

_LOG_TAIL = 4000  # characters of each rank's output that a failure shows
_GRACE_SECONDS = 2.0  # what the other ranks get to fail by themselves once one has failed


class RanksFailedError(RuntimeError):
    """A rank raised, died or did not end in time; the message holds every rank's output."""


def relative_error(actual: Tensor, reference: Tensor) -> float:
    """Return the relative L2 distance ``|actual - reference| / |reference|``, computed in float64.

    Where the reference is zero it is ``|actual|``. NaN gives NaN, which no tolerance accepts.

    Raises:
        ValueError: The shapes differ.
    """
    if actual.shape != reference.shape:
        raise ValueError(
            f"shapes differ: actual {tuple(actual.shape)}, reference {tuple(reference.shape)}; "
            f"an error is defined only between tensors of one shape."
        )
    expected = reference.detach().double().cpu()
    distance = float((actual.detach().double().cpu() - expected).norm())
    size = float(expected.norm())
    return distance / size if size else distance


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: object, timeout: float = 120
) -> list[Any]:
    """Run ``function(*args)`` on gloo ranks of this machine and return what each returned.

    Every rank is a fresh process with one thread, an initialised default process group (gloo,
    file store), ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` set, and a ``TORCH_EXTENSIONS_DIR`` of
    its own. On Linux without a GPU it is forked from a process that has imported torch, and the
    modules that the environment variable MDS_RANKS_PRELOAD lists.

    Args:
        function: A function of an importable module; it and its arguments travel by pickle.
        world_size: How many ranks.
        args: Given to every rank; the rank number is ``torch.distributed.get_rank()``.
        timeout: Seconds after which all ranks are killed.

    Returns:
        One result a rank, in rank order.

    Raises:
        RanksFailedError: A rank raised, died or was too slow.
    """
    work = pickle.dumps((function, args))
    context, environment = _context(), dict(os.environ)
    with _scratch_folder() as folder:
        ranks = [
            context.Process(
                target=_rank_main, args=(work, rank, world_size, folder, timeout, environment)
            )
            for rank in range(world_size)
        ]
        try:
            for process in ranks:
                process.start()
            complaint = _wait_for(ranks, timeout)
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()
        if complaint:
            raise RanksFailedError(complaint + _reports(ranks, folder))
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(world_size)]  # noqa: S301 - our own ranks wrote it


def _context() -> Any:
    """How ranks are started: importing torch takes each of them longer than most tests.

    A process that has looked at a GPU must not be forked, and other systems do not fork safely.
    """
    if sys.platform != "linux" or torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    named = os.environ.get("MDS_RANKS_PRELOAD", "").split(",")
    context.set_forkserver_preload([__name__, *filter(None, named)])
    return context


@contextlib.contextmanager
def _scratch_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="mds-ranks-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(ranks: Sequence[BaseProcess], timeout: float) -> str | None:
    """Wait until all ranks ended well (None), or one failed or time is up (the complaint)."""
    deadline = time.monotonic() + timeout
    complaint: str | None = None
    while running := [process for process in ranks if process.exitcode is None]:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return complaint or f"{len(running)} of {len(ranks)} ranks still ran after {timeout} s"
        wait([process.sentinel for process in running], timeout=remaining)
        if complaint is None and any(process.exitcode for process in ranks):
            complaint = f"a rank of {len(ranks)} failed"
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    return complaint or ("a rank failed" if any(process.exitcode for process in ranks) else None)


def _reports(ranks: Sequence[BaseProcess], folder: Path) -> str:
    report = ""
    for rank, process in enumerate(ranks):
        log = _log(folder, rank)
        told = log.read_text(errors="replace") if log.exists() else ""
        report += f"\n--- rank {rank}, exit code {process.exitcode} ---\n{told[-_LOG_TAIL:]}"
    return report


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _result(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.pickle"


def _rank_main(
    work: bytes,
    rank: int,
    world_size: int,
    folder: Path,
    timeout: float,
    environment: Mapping[str, str],
) -> None:
    with _log(folder, rank).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.clear()  # what the server was started with may have changed since
    os.environ.update(environment)
    _prepare_environment(rank, world_size, folder)
    try:
        # Only now: unpickling imports the function's module, which may look at the environment.
        function, args = pickle.loads(work)  # noqa: S301 - the parent of this process wrote it
        dist.init_process_group(
            "gloo",
            init_method=(folder / "store").as_uri(),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        result = pickle.dumps(function(*args))
    except BaseException:  # noqa: BLE001 - whatever it is, the parent shows it
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a normal exit could wait for ever on the collectives of the others
    _result(folder, rank).write_bytes(result)
    dist.destroy_process_group()


def _prepare_environment(rank: int, world_size: int, folder: Path) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        OMP_NUM_THREADS="1",
        # A killed build leaves a lock on which a later rank would wait for ever: one folder each.
        TORCH_EXTENSIONS_DIR=str(folder / f"extensions-{rank}"),
    )
    if sys.platform == "linux":
        # gloo otherwise resolves the host's name, which fails on machines that don't know theirs.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
