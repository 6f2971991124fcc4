"""Write a synthetic Megatron-DeepSpeed checkpoint: pipeline, ZeRO-1, bf16, any size and layout.

    python packages/mds-ckpt/benchmarks/synthetic_zero.py FOLDER [--megabytes 400] [--tp 2 ...]

The numbers are random, made tensor by tensor, so the generator needs little memory. Vocabulary,
width and depth grow with the size as those of real models do.
"""

from __future__ import annotations

import argparse
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mds_ckpt.checkpoint import Checkpoint, ComputedTensor
from mds_ckpt.families import choose
from mds_ckpt.files.file_operations import REAL
from mds_ckpt.manifest import ModelRecord
from mds_ckpt.megatron.target_layout import TargetLayout
from mds_ckpt.plan import Options
from mds_ckpt.writers.deepspeed import plan

BYTES = 2 + 3 * 4
"""Of one parameter: its weight, its fp32 master, and Adam's two moments."""


def model(megabytes: int) -> ModelRecord:
    """A GPT of about this many megabytes with its optimizer state."""
    params = megabytes * 1_000_000 // BYTES
    hidden = max(256, round((params / 160) ** (1 / 2) / 256) * 256)
    vocab = max(512, params // 5 // hidden // 128 * 128 - 47)
    layers = max(2, round((params - vocab * hidden) / (12 * hidden * hidden)))
    config = {
        "num_layers": layers + layers % 2,
        "hidden_size": hidden,
        "num_attention_heads": hidden // 64,
        "vocab_size": vocab,
        "max_position_embeddings": 1024,
        "activation": "gelu_tanh",
    }
    return ModelRecord(family="gpt", config=config, vocab_size=vocab, tied_embeddings=True)


def synthetic(record: ModelRecord, *, folder: Path) -> Checkpoint:
    """An opened checkpoint whose tensors are made when they are read."""
    names = {rule.canonical.name: rule.canonical.shape for rule in choose(record).rules(record)}
    states: dict[str, dict[str, Any]] = {}
    for state, dtype in {
        "weight": "BF16",
        "master": "F32",
        "exp_avg": "F32",
        "exp_avg_sq": "F32",
    }.items():
        states[state] = {
            name: ComputedTensor(name, shape, dtype, compute=_maker(name, shape, state))
            for name, shape in names.items()
        }
    return Checkpoint(
        path=folder,
        format="synthetic",
        model=record,
        states=states,
        step=100,
        counters={"iteration": 100, "consumed_samples": 800},
        training={"optimizer": {"name": "adam", "step": 100, "groups": [], "loss_scaler": None}},
    )


def _maker(name: str, shape: tuple[int, ...], state: str) -> Any:
    seed = zlib.crc32(name.encode())

    def make() -> Any:
        values = np.random.default_rng(seed).standard_normal(shape, dtype="f4")
        values *= np.float32(0.2)
        if state == "exp_avg_sq":
            np.square(values, out=values)
        elif state == "exp_avg":
            values *= np.float32(0.01)
        return values.astype(ml_dtypes.bfloat16) if state == "weight" else values

    return make


def write(
    folder: Path, megabytes: int, *, tp: int, pp: int, dp: int, pipeline: bool = True
) -> None:
    """Write the checkpoint; ``folder`` must not exist."""
    folder.mkdir(parents=True)
    checkpoint = synthetic(model(megabytes), folder=folder)
    layout = TargetLayout(tp_size=tp, pp_size=pp, dp_size=dp, is_pipeline=pipeline)
    plan(checkpoint, Options(), layout=layout).write(folder, REAL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=int, default=400)
    for degree in ("tp", "pp", "dp"):
        parser.add_argument(f"--{degree}", type=int, default=2)
    arguments = parser.parse_args()
    degrees = {"tp": arguments.tp, "pp": arguments.pp, "dp": arguments.dp}
    write(arguments.folder, arguments.megabytes, **degrees)
    print(model(arguments.megabytes).config)


if __name__ == "__main__":
    main()
