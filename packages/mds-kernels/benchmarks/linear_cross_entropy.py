"""linear_cross_entropy at three sizes beside whole logits, torch's chunked op and other libraries.

    python benchmarks/linear_cross_entropy.py [--largest] [--repeats N] [--threads N]
        [--dtype float32] [--peers Liger Megatron] [--cpu-time]

Peers (pip install megatron-core, liger-kernel with triton) are measured where they are installed.

Prints one Markdown table: medians of alternating runs, as ratios to ours, and peak memory.
"""

import argparse
import platform
import time
from dataclasses import replace

import torch
from peers import installed

from mds_kernels.bench import CONTESTANTS, Workload, bench

SIZES = (
    Workload(tokens=256, hidden_size=256, vocab_size=16384),
    Workload(tokens=1024, hidden_size=256, vocab_size=16384),
    Workload(tokens=1024, hidden_size=768, vocab_size=50304),
)
LARGEST = Workload(tokens=4096, hidden_size=768, vocab_size=50304)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--largest", action="store_true", help="only 4096 x 768 x 50304; minutes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--peers", nargs="*", choices=("Liger", "Megatron"), default=["Megatron"])
    parser.add_argument("--no-torch", action="store_true", help="leave out torch's, which is slow")
    parser.add_argument("--cpu-time", action="store_true", help="for a machine that is not quiet")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    contestants = {**CONTESTANTS, **installed(arguments.peers)}
    if arguments.no_torch:
        contestants.pop("torch, chunked", None)

    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, ", end="")
    print(f"{arguments.threads} thread(s), {arguments.repeats} repeats\n")
    columns = ["tokens x hidden x vocabulary", "dtype", "contestant", "time / ours", "peak / ours"]
    columns += ["peak MiB", "loss error"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for size in (LARGEST,) if arguments.largest else SIZES:
        for dtype in arguments.dtype:
            workload = replace(size, dtype=dtype, threads=arguments.threads)
            figures = bench(
                workload, repeats=arguments.repeats, contestants=contestants, clock=clock
            )
            show(figures, workload)


def show(figures, workload):
    size = f"{workload.tokens} x {workload.hidden_size} x {workload.vocab_size}"
    ours = figures[0]
    for figure in figures:
        time = figure.seconds / ours.seconds
        memory = (figure.peak_mebibytes or 0) / (ours.peak_mebibytes or 1)
        print(
            f"| {size} | {workload.dtype} | {figure.contestant} | {time:.2f} | {memory:.1f} "
            f"| {figure.peak_mebibytes or 0:.0f} | {figure.loss_error:.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
