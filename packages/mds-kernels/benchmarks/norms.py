"""Norms by the compiled CPU kernels beside eager torch, forward and backward.

    mds-kernels build --device cpu
    python benchmarks/norms.py [--threads N] [--repeats N]

Prints one Markdown table: CPU time of plain torch divided by ours, medians of alternating runs.
"""

import argparse
import statistics
import time

import torch

import mds_kernels

SIZES = ((512, 768), (4096, 768), (4096, 4096))
BACKENDS = ("cpu", "torch")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=11)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(
        f"torch {torch.__version__}, {arguments.threads} thread(s), {arguments.repeats} repeats\n"
    )
    print(
        "| op | rows x hidden | dtype | ms of ours | CPU time, torch / ours | wall, torch / ours |"
    )
    print("|---|---|---|---|---|---|")
    for op in ("rms_norm", "add_rms_norm", "add_layer_norm"):
        for rows, hidden in SIZES:
            for dtype in (torch.float32, torch.bfloat16):
                show(op, rows, hidden, dtype, arguments.repeats)


def show(op, rows, hidden, dtype, repeats):
    leaves = [torch.randn(rows, hidden).to(dtype).requires_grad_() for _ in range(2)]
    weight = torch.randn(hidden).to(dtype).requires_grad_()
    inputs = (leaves[0], weight) if op == "rms_norm" else (*leaves, weight)
    cpu, wall = ({name: [] for name in BACKENDS} for _ in range(2))
    for turn in range(repeats + 1):
        for name in BACKENDS:
            start = time.process_time(), time.perf_counter()
            run(op, inputs, name)
            if turn:
                cpu[name].append(time.process_time() - start[0])
                wall[name].append(time.perf_counter() - start[1])
    ratios = [
        statistics.median(times["torch"]) / statistics.median(times["cpu"]) for times in (cpu, wall)
    ]
    kind = str(dtype).removeprefix("torch.")
    ms = statistics.median(wall["cpu"]) * 1000
    print(f"| {op} | {rows} x {hidden} | {kind} | {ms:.2f} | {ratios[0]:.1f} | {ratios[1]:.1f} |")


def run(op, inputs, backend):
    result = getattr(mds_kernels, op)(*inputs, backend=backend)
    results = (result,) if isinstance(result, torch.Tensor) else result
    torch.autograd.grad(results, inputs, [torch.ones_like(one) for one in results])


if __name__ == "__main__":
    main()
