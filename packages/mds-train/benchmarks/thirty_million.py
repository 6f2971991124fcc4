"""A GPT of 30M parameters trained for some minutes, beside plain torch on the same data.

    python packages/mds-train/benchmarks/thirty_million.py [--minutes 15] [--folder DIR]

`mds-train run` trains on the sample corpus for as many steps as fit into the minutes. The peer
(examples/quickstart/plain_torch.py: transformers' GPT-2, torch's AdamW, no engine) starts from the
same initial weights and takes the same samples and steps, in one process with as many threads.
Asked is a validation loss within 1 % of the peer's, in no more time; the exit code is 1 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

from mds_train.watch import read_metrics

PEER = Path(__file__).parents[3] / "examples/quickstart/plain_torch.py"
CONFIG = """\
[model]
num_layers = 8
hidden_size = 512
num_attention_heads = 8
vocab_size = 8192
max_position_embeddings = 256
activation = "gelu_tanh"

[data]
store = "store"
seq_length = 256

[train]
run_dir = "run"
train_steps = {steps}
global_batch_size = 16
micro_batch_size = 16

[optimizer]
lr = 1e-3

[schedule]
warmup_steps = {warmup}
min_lr = 1e-4

[checkpoint]
save_initial = true

[watch]
eval_interval = {steps}
eval_samples = 64
log_interval = {log}
tensorboard = false
curves = false
"""
PROBE_STEPS, WARM_STEPS = 6, 2
MOST_LOSS, MOST_TIME = 1.01, 1.0


def call(*words: str, folder: Path, threads: int) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    subprocess.run([sys.executable, *words], cwd=folder, env=environment, check=True)


def prepare(folder: Path) -> None:
    """Text, tokenizer and store, unless they are there."""
    if (folder / "store").exists():
        return
    encode = "preprocess --input corpus.jsonl --tokenizer tokenizer.json --append-eod"
    for words in (
        "sample-corpus --output corpus.jsonl",
        "train-tokenizer --input corpus.jsonl --vocab-size 8192 --output tokenizer.json",
        f"{encode} --split 95,5,0 --output store",
    ):
        call("-m", "mds_data", *words.split(), folder=folder, threads=2)


def train(folder: Path, run: str, *, steps: int, threads: int) -> float:
    """Run mds-train; wall seconds of the whole process."""
    config = CONFIG.format(steps=steps, warmup=max(1, steps // 20), log=max(1, steps // 10))
    (folder / f"{run}.toml").write_text(config.replace('"run"', f'"{run}"'))
    began = time.monotonic()
    call("-m", "mds_train", "run", f"{run}.toml", folder=folder, threads=threads)
    return time.monotonic() - began


def seconds_of(run: Path, *, after: int = 0) -> list[float]:
    return [entry["seconds"] for entry in read_metrics(run / "metrics.jsonl").train[after:]]


def steps_for(folder: Path, *, minutes: float, threads: int) -> int:
    """How many steps fit into the minutes, by a few of them."""
    if not (folder / "probe").exists():
        train(folder, "probe", steps=PROBE_STEPS, threads=threads)
    seconds = seconds_of(folder / "probe", after=WARM_STEPS)
    return max(4, int(60 * minutes * len(seconds) / sum(seconds)))


def peer(folder: Path, run: str, *, threads: int) -> dict[str, float]:
    """Train plain torch on what the run was trained on; its validation loss and seconds."""
    source = folder / run / "checkpoints/step-0"
    call(
        *("-m", "mds_ckpt", "convert", str(source), "initial", "--to", "hf"),
        folder=folder,
        threads=threads,
    )
    words = (str(PEER), "--model", "initial", "--run", run, "--output", "plain.json")
    call(*words, folder=folder, threads=threads)
    found = json.loads((folder / "plain.json").read_text())
    *_, loss = found["validation"].values()
    return {"validation_loss": loss, "seconds": found["seconds"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--folder", type=Path, default=Path("runs/thirty-million"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    folder, threads = options.folder.resolve(), options.threads
    prepare(folder)
    steps = steps_for(folder, minutes=options.minutes, threads=threads)
    run = f"run-{steps}-{int(time.time())}"
    wall = train(folder, run, steps=steps, threads=threads)
    history = read_metrics(folder / run / "metrics.jsonl")
    (validation,) = history.validation
    ours = sum(seconds_of(folder / run)) + validation["seconds"]
    theirs = peer(folder, run, threads=threads)
    result = {
        "steps": steps,
        "tokens": history.train[-1]["consumed_tokens"],
        "threads": threads,
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "ours": {"validation_loss": validation["loss"], "seconds": ours, "process": wall},
        "plain torch": theirs,
        "loss ratio": validation["loss"] / theirs["validation_loss"],
        "time ratio": ours / theirs["seconds"],
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    good = result["loss ratio"] <= MOST_LOSS and result["time ratio"] <= MOST_TIME
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
