"""Convert a synthetic ZeRO-1 checkpoint (tp2, pp2, dp2), beside cp and DeepSpeed's own tools.

    python packages/mds-ckpt/benchmarks/zero_conversion.py [--megabytes 400] [--repeats 3]
        [--no-peers]

Every run is a process of its own; runs of one round follow one another, and medians of the rounds
are printed with the peak memory of the largest process. The files that cp copies are those that
the conversion beside it reads; cp's speed is that of the bytes that it reads and writes (each once;
sync puts them on the disk), the conversion's that of those that it reads and of its output.
``zero_to_fp32`` knows neither tensor parallelism nor pipelines, so it gets the same model without
either, dp2. DeepSpeed's tools run where DeepSpeed is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import synthetic_zero

from mds_ckpt.manifest import ModelRecord

WRAPPER = """
import json, resource, subprocess, sys, time
start = time.perf_counter()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
seconds = time.perf_counter() - start
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))
"""
"""A small process in between: a child's peak begins with what its parent had when it forked."""
PRETEND = """
import enum, sys, types

class ModelType(enum.Enum):
    encoder_or_decoder = 1

ModelType.__module__ = "megatron.core.enums"
for name in ("megatron", "megatron.core", "megatron.core.enums"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["megatron.core.enums"].ModelType = ModelType
"""
"""The one class of Megatron's that stored arguments name, without which the peers stop."""
LOAD = """
import torch
from pathlib import Path
for path in sorted(Path(sys.argv[1]).rglob("*.pt")):
    torch.load(path, weights_only=False, map_location="cpu")
"""
UNIVERSAL = """
from deepspeed.checkpoint import ds_to_universal
sys.argv[1:] = ["--input_folder", sys.argv[1], "--output_folder", sys.argv[2]]
ds_to_universal.main(ds_to_universal.parse_arguments())
"""
FP32 = """
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
convert_zero_checkpoint_to_fp32_state_dict(sys.argv[1], sys.argv[2], safe_serialization=True)
"""


@dataclass
class Task:
    """One thing that is measured."""

    name: str
    command: list[str]
    output: Path | None
    read: int = 0
    """Bytes of the files that it needs, where that is asked."""
    moved: int = 0
    """Those and the bytes of its output."""
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)

    def run(self) -> None:
        environment = {
            **os.environ,
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
        }
        words = [sys.executable, "-c", WRAPPER, *self.command]
        done = subprocess.run(words, check=True, capture_output=True, env=environment)
        for kept, value in zip(
            (self.seconds, self.cpu, self.peaks), json.loads(done.stdout), strict=True
        ):
            kept.append(value)
        if self.output is not None:
            self.moved = self.read + _size(self.output)
            shutil.rmtree(self.output)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def speed_beside(self, other: Task) -> float:
        """Of the bytes moved where both are known, else of the whole task."""
        volume = self.moved / other.moved if self.read and other.read else 1.0
        return volume * other.median / self.median


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def copying(folder: Path, source: Path, name: str, *, patterns: list[str]) -> Task:
    """Copy the matching files and wait for the disk."""
    chosen = [path for pattern in patterns for path in sorted(source.glob(pattern))]
    target = folder / "copy"
    script = 'mkdir "$0" && cp "$@" "$0" && sync -f "$0"'
    command = ["sh", "-c", script, str(target), *map(str, chosen)]
    return Task(name, command, target, read=sum(path.stat().st_size for path in chosen))


def ours(folder: Path, source: Path, name: str, *words: str, read: int = 0) -> Task:
    target = folder / "out"
    command = [sys.executable, "-m", "mds_ckpt", "convert", str(source), str(target), *words]
    return Task(name, command, target, read=read)


def peer(name: str, program: str, *words: str, output: Path | None = None) -> Task:
    return Task(name, [sys.executable, "-c", PRETEND + program, *words], output)


def tasks(folder: Path, sharded: Path, flat: Path, *, peers: bool) -> list[Task]:
    step = next(sharded.glob("global_step*"))
    out = folder / "out"
    weights = copying(folder, step, "cp + sync, weights", patterns=["layer_*"])
    state = copying(folder, step, "cp + sync, optimizer state", patterns=["*optim_states.pt"])
    found = [
        weights,
        ours(folder, sharded, "mds-ckpt, to hf", "--to", "hf", read=weights.read),
        state,
        ours(folder, sharded, "mds-ckpt, to universal", "--to", "universal", read=state.read),
        ours(folder, flat, "mds-ckpt, masters to hf", "--to", "hf", "--dtype", "fp32"),
    ]
    if peers and importlib.util.find_spec("deepspeed"):
        theirs = out / step.name
        found += [
            peer("ds_to_universal", UNIVERSAL, str(step), str(theirs), output=out),
            peer("zero_to_fp32", FP32, str(flat), str(out), output=out),
            peer("torch.load of all files", LOAD, str(step)),
        ]
    return found


def report(found: list[Task], record: ModelRecord) -> None:
    named = {task.name: task for task in found}
    largest = record.vocab_size * record.config["hidden_size"] * 4 / 1e6
    print(f"largest tensor {largest:.0f} MB, so the bound is {256 + 2 * largest:.0f} MB")
    print("| | GB read and written | seconds | cpu seconds | peak MB | beside |")
    print("|---|---|---|---|---|---|")
    beside = {
        "mds-ckpt, to hf": ["cp + sync, weights"],
        "mds-ckpt, to universal": ["cp + sync, optimizer state", "ds_to_universal"],
        "mds-ckpt, masters to hf": ["zero_to_fp32"],
    }
    for task in found:
        others = [named[name] for name in beside.get(task.name, []) if name in named]
        ratios = [f"{task.speed_beside(other):.2f} x {other.name}" for other in others]
        cpu, peak = statistics.median(task.cpu), max(task.peaks)
        moved = f"{task.moved / 1e9:.2f}" if task.read else ""
        numbers = [f"{task.median:.2f}", f"{cpu:.2f}", f"{peak:.0f}"]
        columns = [task.name, moved, *numbers, ", ".join(ratios)]
        print("| " + " | ".join(columns) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--no-peers", action="store_true", help="leave DeepSpeed's tools out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        sharded, flat = folder / "sharded", folder / "flat"
        synthetic_zero.write(sharded, arguments.megabytes, tp=2, pp=2, dp=2)
        synthetic_zero.write(flat, arguments.megabytes, tp=1, pp=1, dp=2, pipeline=False)
        load = os.getloadavg()
        print(f"{_size(sharded) / 1e6:.0f} MB, load {load[0]:.1f} on {os.cpu_count()} processors")
        found = tasks(folder, sharded, flat, peers=not arguments.no_peers)
        for _ in range(arguments.repeats):
            for task in found:
                task.run()
        report(found, synthetic_zero.model(arguments.megabytes))


if __name__ == "__main__":
    main()
