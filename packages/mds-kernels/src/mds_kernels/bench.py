"""Time and memory of ``linear_cross_entropy`` beside what one would use without it.

The contestants take turns in one process, so that a busy machine is unkind to all of them alike,
and the figures are ratios of medians. Peak memory comes from a process of its own for each.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mds_kernels.ops.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
)

__all__ = ["CONTESTANTS", "Figure", "Workload", "bench"]

_REFERENCE_CHUNK = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One size of the problem."""

    tokens: int = 1024
    hidden_size: int = 256
    vocab_size: int = 16384
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden, weight and labels, the same for all contestants."""
        generator = torch.Generator().manual_seed(0)
        dtype = getattr(torch, self.dtype)
        hidden = torch.randn(self.tokens, self.hidden_size, generator=generator)
        weight = torch.randn(self.vocab_size, self.hidden_size, generator=generator) * 0.05
        labels = torch.randint(0, self.vocab_size, (self.tokens,), generator=generator)
        return (
            hidden.to(self.device, dtype).requires_grad_(),
            weight.to(self.device, dtype).requires_grad_(),
            labels.to(self.device),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """What was measured of one contestant."""

    contestant: str
    seconds: float
    """Median of a forward and backward pass."""
    peak_mebibytes: float | None
    """Above what was held before the pass; None where the system does not tell."""
    loss_error: float
    """Of the mean loss, absolute, against float64."""


def _ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, labels).loss_sum / labels.numel()


def _naive(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), labels)


def _torch(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.linear_cross_entropy(
        hidden, weight, labels, options=torch.nn.LinearCrossEntropyOptions()
    )


Contestant = Callable[[Tensor, Tensor, Tensor], Tensor]
CONTESTANTS: Mapping[str, Contestant] = {
    "mds_kernels": _ours,
    "logits and cross_entropy": _naive,
    **({"torch, chunked": _torch} if hasattr(F, "linear_cross_entropy") else {}),
}
"""Ours first; torch's own where this torch has it."""


def bench(
    workload: Workload,
    *,
    repeats: int = 5,
    contestants: Mapping[str, Contestant] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Figure]:
    """Measure every contestant, a function of a module each, on one workload, taking turns.

    Args:
        workload: The size.
        repeats: Passes of each, after a first one that is not measured.
        contestants: By name; `CONTESTANTS` if None.
        clock: ``time.process_time`` for a machine that is busy with other work.
    """
    torch.set_num_threads(workload.threads)
    inputs = workload.inputs()
    exact = _exact_loss(*inputs)
    contestants = CONTESTANTS if contestants is None else contestants
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    losses: dict[str, float] = {}
    for turn in range(repeats + 1):
        for name, contestant in contestants.items():
            took, losses[name] = _timed(contestant, inputs, clock)
            if turn:  # the first warms caches and the allocator
                seconds[name].append(took)
    return [
        Figure(
            contestant=name,
            seconds=statistics.median(seconds[name]),
            peak_mebibytes=_peak_elsewhere(contestant, workload),
            loss_error=abs(losses[name] - exact),
        )
        for name, contestant in contestants.items()
    ]


def _timed(
    contestant: Contestant,
    inputs: tuple[Tensor, Tensor, Tensor],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    hidden, weight, labels = inputs
    _wait_for(hidden.device)
    start = clock()
    loss = contestant(hidden, weight, labels)
    torch.autograd.grad(loss, (hidden, weight))
    _wait_for(hidden.device)
    return clock() - start, float(loss.detach())


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _exact_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> float:
    """Return the mean loss in float64, a few tokens at a time."""
    starts = range(0, labels.numel(), _REFERENCE_CHUNK)
    chunks = [slice(start, start + _REFERENCE_CHUNK) for start in starts]
    with torch.no_grad():
        losses = [
            linear_cross_entropy_reference(hidden[chunk], weight, labels[chunk]).losses
            for chunk in chunks
        ]
    return float(torch.cat(losses).mean())


def _peak_elsewhere(contestant: Contestant, workload: Workload) -> float | None:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_peak, args=(sender, contestant, workload))
    process.start()
    sender.close()
    try:
        peak: float | None = receiver.recv()
    finally:
        process.join()
    return peak


def _send_peak(sender: Connection, contestant: Contestant, workload: Workload) -> None:
    torch.set_num_threads(workload.threads)
    inputs = workload.inputs()
    # A first small pass loads libraries and starts threads, which are not the contestant's memory.
    _timed(contestant, (inputs[0][:8], inputs[1], inputs[2][:8]))
    measure = _peak_on_cuda if workload.device == "cuda" else _peak_on_linux
    sender.send(measure(contestant, inputs))


def _peak_on_cuda(contestant: Contestant, inputs: tuple[Tensor, Tensor, Tensor]) -> float:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _timed(contestant, inputs)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _peak_on_linux(contestant: Contestant, inputs: tuple[Tensor, Tensor, Tensor]) -> float | None:
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists():
        return None
    reset.write_text("5")  # the peak starts again at what is resident now
    before = _kibibytes(status, "VmRSS:")
    _timed(contestant, inputs)
    return (_kibibytes(status, "VmHWM:") - before) / 1024


def _kibibytes(status: Path, key: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1])
