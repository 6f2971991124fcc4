"""The products of a layer's experts, one after the other and as torch's grouped product, in turns.

    python benchmarks/grouped_experts.py [--rounds 9] [--threads 2]

The grouped product takes all weights as one tensor; ours are one parameter an expert, so that a
checkpoint and a data-parallel rank can hold any of them, and are put together first.
"""

import argparse
import statistics
import time

import torch
from torch.nn import functional as F

SHAPES = (
    (4, 384, 1024, 2048),
    (8, 384, 1024, 4096),
    (32, 256, 256, 2048),
    (64, 256, 128, 2048),
    (128, 128, 64, 2048),
    (64, 512, 512, 512),
)
"""Experts, width of their input and output, tokens."""


def one_by_one(x, weights, counts):
    parts = x.split(counts.tolist())
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])


def grouped(x, weights, counts):
    ends = counts.cumsum(0).to(torch.int32)
    return F.grouped_mm(x, torch.stack(weights).mT, offs=ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    columns = ["dtype", "experts, in, out, tokens", "one by one ms", "grouped ms", "ratio"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            own, theirs = compare(dtype, *shape, rounds=arguments.rounds)
            name = str(dtype).removeprefix("torch.")
            print(f"| {name} | {shape} | {own:.1f} | {theirs:.1f} | {theirs / own:.2f} |")


def compare(dtype, experts, width, out, tokens, *, rounds):
    """Median milliseconds, forward and backward, of both."""
    torch.manual_seed(0)
    chosen = torch.randint(experts, (tokens,))
    counts = torch.bincount(chosen, minlength=experts)
    x = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weights = [torch.randn(out, width, dtype=dtype, requires_grad=True) for _ in range(experts)]
    dy = torch.randn(tokens, out, dtype=dtype)
    times = {one_by_one: [], grouped: []}
    for _ in range(1 + rounds):
        for way, taken in times.items():
            start = time.perf_counter()
            torch.autograd.grad(way(x, weights, counts), [x, *weights], dy)
            taken.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(taken[1:]) for taken in times.values()]


if __name__ == "__main__":
    main()
