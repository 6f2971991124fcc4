"""Steps of other trainers on a GPT of the same shape, for loop_overhead.py.

    PEER_PYTHON trainer_peers.py LAYERS HIDDEN HEADS VOCABULARY LENGTH BATCH STEPS

It imports nothing of ours, so it runs in an environment of its own: `uv venv peers`, then `uv pip
install transformers accelerate litgpt`. Prints one JSON object: tokens per second of each that is
there, from the median time between two steps. litgpt compiles its model first; that is switched
off, since the steps that it is compared with are not compiled.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WARM_UP = 5


def rate(ends: list[float], *, tokens: int) -> int:
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    return round(tokens / statistics.median(seconds[WARM_UP:]))


def trainer(shape: list[int], steps: int, folder: Path) -> int:
    """transformers' Trainer on a GPT-2 without dropout."""
    import torch
    import transformers

    layers, hidden, heads, vocabulary, length, batch = shape
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=vocabulary,
            n_positions=length,
            n_embd=hidden,
            n_layer=layers,
            n_head=heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    rows = torch.randint(0, vocabulary, (batch * (steps + WARM_UP), length))
    ends: list[float] = []

    class Ends(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=batch,
        max_steps=steps + WARM_UP,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    samples = [{"input_ids": row, "labels": row} for row in rows]
    transformers.Trainer(
        model=model, args=arguments, train_dataset=samples, callbacks=[Ends()]
    ).train()
    return rate(ends, tokens=batch * length)


def litgpt(shape: list[int], steps: int, folder: Path) -> int:
    """litgpt's pretrain on a GPT of GPT-2's kind (with untied embeddings, which it has always)."""
    import torch
    from litgpt import Config, pretrain
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.data import DataModule

    layers, hidden, heads, vocabulary, length, batch = shape
    rows = torch.randint(0, vocabulary, (batch * (steps + 2 * WARM_UP), length + 1))
    ends: list[float] = []

    class Timed:
        def __iter__(self) -> Iterator[torch.Tensor]:
            for part in rows.split(batch):
                ends.append(time.perf_counter())
                yield part

        def __len__(self) -> int:
            return len(rows) // batch

    class Rows(DataModule):  # type: ignore[misc]
        def connect(self, *_: Any, **__: Any) -> None: ...

        def train_dataloader(self) -> Timed:
            return Timed()

        val_dataloader = train_dataloader

        def __str__(self) -> str:  # the usual one reads the loaders
            return "rows"

    config = Config(
        n_layer=layers,
        n_embd=hidden,
        n_head=heads,
        padded_vocab_size=vocabulary,
        block_size=length,
        norm_class_name="LayerNorm",
        mlp_class_name="GptNeoxMLP",
        bias=True,
        name="peer",
    )
    # What it hands the loaders to wraps torch's own only; these need no device.
    fabric = pretrain.L.Fabric
    fabric.setup_dataloaders = lambda self, *loaders: list(loaders)
    pretrain.save_checkpoint = lambda *_: None  # at its end, after the steps
    pretrain.setup(
        "peer",
        config,
        out_dir=folder / "litgpt",
        precision="32-true",
        data=Rows(),
        train=TrainArgs(
            save_interval=None,
            log_interval=10,
            global_batch_size=batch,
            micro_batch_size=batch,
            max_tokens=(steps + WARM_UP) * batch * length,
            max_norm=1.0,
            lr_warmup_steps=10,
            min_lr=1e-5,
            tie_embeddings=False,
        ),
        eval=EvalArgs(interval=10**9, max_iters=1, final_validation=False),
        devices=1,
        logger_name="csv",
    )
    return rate(ends[3:], tokens=batch * length)  # the first ones are its sanity check's


def main() -> None:
    *shape, steps = map(int, sys.argv[1:8])
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    found = {}
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(sys.stderr):
        if all(importlib.util.find_spec(each) for each in ("transformers", "accelerate")):
            found["transformers' Trainer tokens/s"] = trainer(shape, steps, Path(name))
        if importlib.util.find_spec("litgpt"):
            found["litgpt tokens/s"] = litgpt(shape, steps, Path(name))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
