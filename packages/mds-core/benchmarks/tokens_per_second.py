"""Training speed and memory of a GPT-2 beside plain torch, transformers and LitGPT.

    python benchmarks/tokens_per_second.py [--shape 14m] [--precision bf16] [--compile] ...

Every contestant lives in a process of its own and they take turns, one step each, so that a busy
machine is unkind to all alike; a square matrix product takes its turn too. A step is forward,
backward and a fused AdamW. Prints one Markdown table: medians, the ratio of speeds to the first
contestant (medians of the rounds' ratios), the share of the matrix product's rate, and peak memory
(parameters, optimizer state and what a step needs above them).
"""

import argparse
import ctypes
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from contestants import CONTESTANTS, SHAPES, Shape, gemm

GEMM = "matrix product"
GEMM_SIZE = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How all contestants run."""

    shape: Shape
    precision: str
    compiled: bool
    threads: int
    cpu_time: bool

    @property
    def parameter_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def product_dtype(self) -> torch.dtype:
        return torch.float32 if self.precision == "fp32" else torch.bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a contestant tells when it is ready."""

    parameters: int
    peak_mebibytes: float
    loss: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="14m")
    parser.add_argument("--batch", type=int, help="samples of a step; the shape's own if left out")
    parser.add_argument("--precision", choices=("fp32", "bf16", "bf16-autocast"), default="bf16")
    parser.add_argument("--compile", action="store_true", help="torch.compile every contestant")
    parser.add_argument("--only", nargs="*", choices=CONTESTANTS, help="contestants; ours first")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="for a machine that is not quiet")
    arguments = parser.parse_args()

    shape = SHAPES[arguments.shape]
    setting = Setting(
        shape=replace(shape, batch=arguments.batch or shape.batch),
        precision=arguments.precision,
        compiled=arguments.compile,
        threads=arguments.threads,
        cpu_time=arguments.cpu_time,
    )
    mode = "compiled" if setting.compiled else "eager"
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, ", end="")
    print(f"{setting.threads} thread(s), {arguments.rounds} rounds; {setting.shape}, ", end="")
    print(f"{setting.precision}, {mode}\n", flush=True)
    workers = start(arguments.only or list(CONTESTANTS), setting)
    try:
        show(setting, workers, take_turns(workers, arguments.rounds))
    finally:
        for process, connection, _ in workers.values():
            connection.close()
            process.join()


def start(names: list[str], setting: Setting) -> dict[str, tuple]:
    """Start the contestants one after the other; one whose library is missing is left out."""
    context = multiprocessing.get_context("spawn")
    workers = {}
    for name in [GEMM, *names]:
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, name, setting), daemon=True)
        process.start()
        theirs.close()
        report = ours.recv()
        if isinstance(report, str):
            print(f"left out: {name}: {report}\n", flush=True)
            continue
        workers[name] = (process, ours, report)
    return workers


def take_turns(workers: dict[str, tuple], rounds: int) -> dict[str, list[float]]:
    """Seconds of every contestant's step in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(rounds):
        for name, (_, connection, _) in workers.items():
            connection.send(None)
            seconds[name].append(connection.recv())
    return seconds


def show(setting: Setting, workers: dict[str, tuple], seconds: dict[str, list[float]]) -> None:
    rate = 2 * GEMM_SIZE**3 / statistics.median(seconds[GEMM])
    print(f"matrix product {GEMM_SIZE} x {GEMM_SIZE}: {rate / 1e9:.0f} GFLOP/s\n")
    names = [name for name in workers if name != GEMM]
    shape = setting.shape
    columns = ["contestant", "tokens/s", "speed / first", "of matrix product", "peak MiB", "loss"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name in names:
        report, median = workers[name][2], statistics.median(seconds[name])
        pairs = zip(seconds[names[0]], seconds[name], strict=True)
        ratio = statistics.median(first / own for first, own in pairs)
        share = shape.flops(parameters=report.parameters) / median / rate
        print(
            f"| {name} | {shape.batch * shape.length / median:.0f} | {ratio:.3f} | {share:.1%} "
            f"| {report.peak_mebibytes:.0f} | {report.loss:.4f} |"
        )


def work(connection: Connection, name: str, setting: Setting) -> None:
    """Build a contestant, report on it, and then take a step whenever asked."""
    torch.set_num_threads(setting.threads)
    torch.manual_seed(0)
    if name == GEMM:
        run = gemm(GEMM_SIZE, setting.product_dtype)
        run()
        report = Report(parameters=0, peak_mebibytes=0.0, loss=0.0)
    else:
        try:
            run, report = prepared(name, setting)
        except ImportError as error:
            connection.send(str(error))
            return
    connection.send(report)
    clock = time.process_time if setting.cpu_time else time.perf_counter
    while True:
        try:
            connection.recv()
        except EOFError:
            return
        start = clock()
        run()
        connection.send(clock() - start)


def prepared(name: str, setting: Setting) -> tuple[Callable[[], float], Report]:
    """A contestant's step after warming up, and what it needs."""
    shape = setting.shape
    model, loss_of = CONTESTANTS[name](shape)
    model.to(setting.parameter_dtype)
    if setting.compiled:
        loss_of = torch.compile(loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    window = torch.randint(0, shape.vocab_size, (shape.batch, shape.length + 1))
    tokens, labels = window[:, :-1].contiguous(), window[:, 1:].contiguous()
    autocast = setting.precision == "bf16-autocast"

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(tokens, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    first = step()
    step()
    optimizer.zero_grad(set_to_none=True)
    peak = held(model, optimizer) + needed(step)
    count = sum(parameter.numel() for parameter in model.parameters())
    return step, Report(parameters=count, peak_mebibytes=peak / 2**20, loss=first)


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of parameters and optimizer state."""
    states = [x for state in optimizer.state.values() for x in state.values()]
    tensors = [*model.parameters(), *(x for x in states if isinstance(x, torch.Tensor))]
    return sum(x.numel() * x.element_size() for x in tensors)


def needed(step: Callable[[], float]) -> float:
    """Bytes that a step needs at most, above what is there before it (on Linux)."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists():
        return float("nan")
    ctypes.CDLL(None).malloc_trim(0)  # what the steps before freed would hide what this one needs
    reset.write_text("5")
    before = kibibytes(status, "VmRSS:")
    step()
    return 1024 * (kibibytes(status, "VmHWM:") - before)


def kibibytes(status: Path, key: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1])


if __name__ == "__main__":
    main()
