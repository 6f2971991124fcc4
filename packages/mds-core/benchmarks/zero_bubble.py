"""Time and memory of pipeline schedules on gloo ranks, beside what the simulator says.

    python benchmarks/zero_bubble.py [--ranks 4] [--micro-batches 8] [--unit 0.05] [--repeats 5]

The time is that of stages that sleep, one unit in a forward pass, one for the gradient of the input
and one for those of the weights, so that a machine with fewer cores than ranks shows bubbles too.
The memory is that of a GPT: the most bytes that live on a rank at once during a step, parameters
and gradients excepted.
"""

import argparse
import statistics
import time
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.utils._python_dispatch import TorchDispatchMode

from mds_core import GPTConfig, Layout, ProcessGroups
from mds_core.pipeline import SCHEDULES, Pipeline, simulate
from mds_core.pipeline.deferred import WeightGradients
from mds_kernels.testing import run_ranks

NAMES = ("1f1b", "zb-h1", "zb-h1-lazy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.05, help="seconds")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()

    ranks, count = arguments.ranks, arguments.micro_batches
    times = run_ranks(sleep_all, ranks, count, arguments.unit, arguments.repeats, timeout=280)
    peaks = run_ranks(weigh_all, ranks, count, timeout=280)
    simulated = {n: simulate(n, pp_size=ranks, micro_batches=count).makespan for n in NAMES}
    print(f"{ranks} ranks, {count} micro batches, units of {1000 * arguments.unit:.0f} ms\n")
    columns = ["schedule", "units", "simulated", "time / 1f1b", "simulated", "peak MiB by rank"]
    columns += ["peak / 1f1b"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    first = NAMES[0]
    for name in NAMES:
        # A step ends with its last rank; in each repeat the schedules took turns.
        own, base = (
            [max(rank[n][i] for rank in times) for i in range(arguments.repeats)]
            for n in (name, first)
        )
        ratio = statistics.median(a / b for a, b in zip(own, base, strict=True))
        held = [rank[name] for rank in peaks]
        print(
            f"| {name} | {statistics.median(own) / arguments.unit:.1f} | {simulated[name]:g} "
            f"| {ratio:.3f} | {simulated[name] / simulated[first]:.3f} "
            f"| {' '.join(f'{peak / 2**20:.1f}' for peak in held)} "
            f"| {max(held) / max(rank[first] for rank in peaks):.2f} |"
        )


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, stage):
        time.sleep(stage.unit)
        ctx.stage = stage
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        stage = ctx.stage
        time.sleep(stage.unit)
        if stage.gradients is None:
            time.sleep(stage.unit)
        else:
            stage.gradients.put(lambda: time.sleep(stage.unit))
        return grads[0], None


class SleepingStage(nn.Module):
    """A stage that only takes time."""

    def __init__(self, unit: float, *, splits: bool) -> None:
        super().__init__()
        self.unit = unit
        self.gradients = WeightGradients() if splits else None
        self.weight = nn.Parameter(torch.zeros(()))  # without it the first stage has no backward

    def forward(self, x):
        return _Slow.apply(x + self.weight, self)


def sleep_all(count: int, unit: float, repeats: int) -> dict[str, list[float]]:
    """Run on each rank: seconds of every step of every schedule."""
    schedules = {name: sleeping(name, count, unit) for name in NAMES}
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in range(repeats + 1):
        for name, schedule in schedules.items():
            took = timed(schedule, count)
            if turn:  # the first opens the connections between neighbours
                seconds[name].append(took)
    return seconds


def sleeping(name: str, count: int, unit: float):
    rank, size, schedule = dist.get_rank(), dist.get_world_size(), SCHEDULES[name]
    stage = SleepingStage(unit, splits=schedule.splits)
    example = torch.zeros(1, 4, requires_grad=rank > 0)
    torch_stage = PipelineStage(
        stage,
        rank,
        size,
        torch.device("cpu"),
        input_args=(example,),
        output_args=(torch.zeros(1, 4, requires_grad=True),),
        dw_builder=stage.gradients.take if stage.gradients is not None else None,
    )
    return schedule.torch_class(
        [torch_stage] if name != "1f1b" else torch_stage,
        count,
        loss_fn=lambda output, target: (output - target).sum(),
        scale_grads=False,
    )


def timed(schedule, count: int) -> float:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    batch = torch.zeros(count, 4)
    dist.barrier()
    start = time.perf_counter()
    schedule.step(
        *([batch] if rank == 0 else []),
        **({"target": batch} if rank == last else {}),
        return_outputs=False,
    )
    return time.perf_counter() - start


def weigh_all(count: int) -> dict[str, int]:
    """Run on each rank: the most bytes that live in a step of every schedule."""
    groups = ProcessGroups.build(Layout(pp_size=dist.get_world_size()))
    config = GPTConfig(
        num_layers=2 * groups.pp_size,
        hidden_size=256,
        num_attention_heads=4,
        vocab_size=512,
        max_position_embeddings=128,
    )
    window = torch.randint(0, 512, (4 * count, 129), generator=torch.Generator().manual_seed(0))
    peaks = {}
    for name in NAMES:
        pipeline = Pipeline(config, groups, micro_batches=count, schedule=name)
        pipeline.step(window[:, :-1], window[:, 1:])  # so that gradients and buffers are there
        with LiveBytes() as live:
            pipeline.step(window[:, :-1], window[:, 1:])
        peaks[name] = live.peak
    return peaks


class LiveBytes(TorchDispatchMode):
    """Count the bytes of tensors that come into being, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: weakref.WeakSet = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in inputs:
                self._count(x.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.now -= size


if __name__ == "__main__":
    main()
