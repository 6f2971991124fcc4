"""What the training loop costs beside the bare model step, at the start and at saves.

    python packages/mds-train/benchmarks/loop_overhead.py [--sizes small medium large] [--steps 20]
        [--peers PYTHON]

The bare step is forward, backward, clipping and AdamW of the same model on a batch that is there
already. It is taken in turn with the loop's steps, so both see the same machine; the ratio is that
of the medians. `--peers` names a Python that has other trainers (see trainer_peers.py). The start
is measured from a fresh process, the stall of a save from step to step, and a checkpoint's
bandwidth beside that of `cp` with `sync`.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mds_core import ProcessGroups
from mds_core.models import GPT
from mds_data import write_store
from mds_train import TrainConfig, train
from mds_train.config import (
    CheckpointConfig,
    DataConfig,
    LoopConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    WatchConfig,
)
from mds_train.events import StepReport

SIZES = {  # layers, hidden, heads, vocabulary, sequence, micro batch
    "small": (2, 64, 2, 512, 64, 4),
    "medium": (4, 256, 4, 4096, 128, 4),
    "large": (6, 384, 6, 8192, 128, 4),
}
WARM_UP = 3


def configuration(folder: Path, size: str, *, steps: int, **checkpoint: Any) -> TrainConfig:
    """One process, fp32, no validation; nothing is saved unless asked for."""
    layers, hidden, heads, vocabulary, length, batch = SIZES[size]
    store = folder / f"store-{vocabulary}"
    if not store.exists():
        random = np.random.default_rng(1)
        documents = [random.integers(0, vocabulary, 2048) for _ in range(64)]
        write_store(store, documents, vocab_size=vocabulary, eod_id=0)
    return TrainConfig(
        model=ModelConfig(
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            vocab_size=vocabulary,
            max_position_embeddings=length,
        ),
        data=DataConfig(store=str(store), seq_length=length, split="100,0,0"),
        train=LoopConfig(
            run_dir=tempfile.mkdtemp(dir=folder),
            train_steps=steps,
            global_batch_size=batch,
            micro_batch_size=batch,
            device="cpu",
        ),
        optimizer=OptimizerConfig(),
        parallel=ParallelConfig(zero_stage=0),
        checkpoint=CheckpointConfig(save_final=False, **checkpoint),
        watch=WatchConfig(),
    )


@dataclass
class Clock:
    """A watcher that measures from step to step, and may do something else in between."""

    between: Callable[[], None] = lambda: None
    seconds: list[float] = field(default_factory=list)
    since: float = 0.0

    def on_start(self, _: object) -> None:
        self.since = time.perf_counter()

    def on_step(self, _: StepReport) -> None:
        self.seconds.append(time.perf_counter() - self.since)
        self.between()
        self.since = time.perf_counter()

    def on_validation(self, _: object) -> None: ...

    def on_event(self, _: object) -> None: ...

    def on_finish(self, _: object) -> None: ...


class BareStep:
    """The model and torch's AdamW, nothing else."""

    def __init__(self, config: TrainConfig) -> None:
        self.model = GPT(config.model.core(), ProcessGroups.single(), seed=1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        shape = (config.train.micro_batch_size, config.data.seq_length)
        self.tokens = torch.randint(0, config.model.vocab_size, shape)
        self.seconds: list[float] = []

    def __call__(self) -> None:
        began = time.perf_counter()
        loss = self.model(self.tokens, self.tokens).loss_sum / self.tokens.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - began)


def compare_steps(folder: Path, size: str, *, steps: int) -> dict[str, Any]:
    """The loop's steps and bare ones in turn."""
    config = configuration(folder, size, steps=steps + WARM_UP)
    bare = BareStep(config)
    clock = Clock(between=bare)
    train(config, watchers=[clock])
    loop = statistics.median(clock.seconds[WARM_UP:])
    alone = statistics.median(bare.seconds[WARM_UP:])
    tokens = config.train.global_batch_size * config.data.seq_length
    return {
        "parameters": config.model.num_params(),
        "loop tokens/s": round(tokens / loop),
        "bare tokens/s": round(tokens / alone),
        "overhead": f"{loop / alone - 1:+.1%}",
        "overhead ms": round(1000 * (loop - alone), 2),
    }


def peers(python: Path, size: str, *, steps: int) -> dict[str, Any]:
    """Other trainers' tokens per second, in an environment of theirs; nothing without one."""
    script = Path(__file__).with_name("trainer_peers.py")
    command = [str(python), str(script), *map(str, SIZES[size]), str(steps)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        return {"peers": (ran.stderr.strip().splitlines() or ["failed"])[-1]}
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def start_up(folder: Path) -> dict[str, Any]:
    """Seconds of a fresh process until its first step is written, and until it ends."""
    config = configuration(folder, "small", steps=1)
    toml = folder / "start.toml"
    lines = ["[model]", *_toml(config.model, "num_layers hidden_size num_attention_heads")]
    lines += _toml(config.model, "vocab_size max_position_embeddings")
    lines += ["[data]", *_toml(config.data, "store seq_length split")]
    lines += ["[train]", *_toml(config.train, "train_steps global_batch_size micro_batch_size")]
    run_dir = folder / "start"
    toml.write_text("\n".join([*lines, f'run_dir = "{run_dir}"', 'device = "cpu"', ""]))
    command = [sys.executable, "-m", "mds_train", "run", str(toml)]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    first = None
    while process.poll() is None:
        if first is None and '"train"' in _text(run_dir / "metrics.jsonl"):
            first = time.perf_counter() - began
        time.sleep(0.02)
    ended = time.perf_counter() - began
    return {
        "start to first step s": round(first or ended, 2),
        "whole process s": round(ended, 2),
        "exit": process.returncode,
    }


def _toml(table: object, names: str) -> list[str]:
    return [f"{name} = {json.dumps(getattr(table, name))}" for name in names.split()]


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def saves(folder: Path, size: str) -> dict[str, Any]:
    """How much longer a step with a save is, in step and beside; the bandwidth of one in step."""
    found: dict[str, Any] = {}
    every = 4
    for name, beside in (("sync", False), ("async", True)):
        config = configuration(
            folder, size, steps=4 * every, save_interval=every, keep_last=1, async_save=beside
        )
        clock = Clock()
        train(config, watchers=[clock])
        # A save after step n is in the time that ends with step n + 1.
        with_save = [clock.seconds[n] for n in range(every, len(clock.seconds), every)]
        without = [s for n, s in enumerate(clock.seconds) if n > 1 and n % every not in (0, 1, 2)]
        stall = statistics.median(with_save) - statistics.median(without)
        found[f"{name} save stall ms"] = round(1000 * stall, 1)
        checkpoint = next(Path(config.train.run_dir, "checkpoints").glob("step-*"))
        if not beside:
            size_of = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
            found["checkpoint MB"] = round(size_of / 1e6, 1)
            found["save MB/s"] = round(size_of / 1e6 / max(stall, 1e-9))
            found["cp and sync MB/s"] = round(size_of / 1e6 / _copied(checkpoint, folder))
        shutil.rmtree(config.train.run_dir)
    return found


def _copied(source: Path, folder: Path) -> float:
    target, times = folder / "copied", []
    for _ in range(3):
        shutil.rmtree(target, ignore_errors=True)
        began = time.perf_counter()
        subprocess.run(["cp", "-r", str(source), str(target)], check=True)
        files = [str(path) for path in target.rglob("*") if path.is_file()]
        subprocess.run(["sync", *files], check=True)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--peers", type=Path, help="a Python with transformers, accelerate, litgpt")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads")
    print(f"torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for size in arguments.sizes:
            row = compare_steps(folder, size, steps=arguments.steps)
            if arguments.peers is not None:
                row |= peers(arguments.peers, size, steps=arguments.steps)
            print(json.dumps({"size": size} | row | saves(folder, size)), flush=True)
        print(json.dumps(start_up(folder)))


if __name__ == "__main__":
    main()
