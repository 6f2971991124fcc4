"""The peer of the quickstart: the same model, data and steps in plain torch.

transformers' GPT-2 starts from the exported initial weights; torch's AdamW and a schedule written
out here train it, in one process without an engine. Only the samples come from mds-data, since the
data must be the same.

    python plain_torch.py --model hf-initial --run runs/quickstart/run --output plain.json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from mds_data import GPTDataset, open_store


def learning_rate(updates: int, *, config: dict[str, Any]) -> float:
    """Return the rate in force after ``updates`` updates: warm up from 0, then a cosine."""
    schedule, highest = config["schedule"], config["optimizer"]["lr"]
    lowest, warmup = schedule["min_lr"], schedule["warmup_steps"]
    if updates < warmup:
        return highest * updates / warmup
    share = (updates - warmup) / (config["train"]["train_steps"] - warmup)
    return lowest + (highest - lowest) * 0.5 * (1 + math.cos(math.pi * share))


def make_optimizer(model: torch.nn.Module, *, config: dict[str, Any]) -> torch.optim.AdamW:
    """Return AdamW that decays matrices and leaves biases and norms alone."""
    settings = config["optimizer"]
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings["weight_decay"]},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    betas = (settings["beta1"], settings["beta2"])
    return torch.optim.AdamW(groups, lr=settings["lr"], betas=betas, eps=settings["eps"])


def mean_loss(model: torch.nn.Module, samples: list[dict[str, Any]]) -> torch.Tensor:
    """Return the mean next-token loss over ``samples``."""
    tokens = torch.stack([torch.as_tensor(sample["tokens"]) for sample in samples])
    labels = torch.stack([torch.as_tensor(sample["labels"]) for sample in samples])
    logits = model(input_ids=tokens).logits
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@torch.no_grad()
def validate(model: torch.nn.Module, dataset: GPTDataset, *, samples: int, at_once: int) -> float:
    """Return the mean loss over the first ``samples`` of ``dataset``."""
    samples = min(samples, len(dataset))
    total = 0.0
    for start in range(0, samples, at_once):
        batch = [dataset[i] for i in range(start, min(start + at_once, samples))]
        total += float(mean_loss(model, batch)) * len(batch)
    return total / samples


def clip_gradients(model: torch.nn.Module, *, most: float) -> None:
    """Clip by the norm of all gradients, summed in float64.

    ``torch.nn.utils.clip_grad_norm_`` sums in float32, which on a CPU gives a norm 1e-3 too small.
    """
    gradients = [parameter.grad for parameter in model.parameters()]
    norms = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), most, norms.norm())


def train(model: torch.nn.Module, *, config: dict[str, Any]) -> dict[int, float]:
    """Train as the run's configuration says; return the validation loss after some of the steps."""
    batch, steps = config["train"]["global_batch_size"], config["train"]["train_steps"]
    dataset = samples_of(config, split="train", num_samples=batch * steps)
    optimizer = make_optimizer(model, config=config)
    held_out, samples = samples_of(config, split="valid"), config["watch"]["eval_samples"]
    at_once = config["train"]["micro_batch_size"]
    found = {}
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config=config)
        loss = mean_loss(model, [dataset[step * batch + i] for i in range(batch)])
        loss.backward()
        clip_gradients(model, most=config["train"]["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % config["watch"]["eval_interval"] == 0 or step + 1 == steps:
            found[step + 1] = validate(model, held_out, samples=samples, at_once=at_once)
            shown = f"loss {loss.item():.4f} | validation loss {found[step + 1]:.4f}"
            sys.stdout.write(f"plain torch, step {step + 1}/{steps} | {shown}\n")
            sys.stdout.flush()
    return found


def samples_of(config: dict[str, Any], *, split: str, num_samples: int | None = None) -> GPTDataset:
    """Return the samples that the run used."""
    store, length = open_store(Path(config["data"]["store"])), config["data"]["seq_length"]
    seed = config["train"]["seed"]
    return GPTDataset(store, seq_length=length, num_samples=num_samples, seed=seed, split=split)


def main() -> None:
    """Train, validate, and write both results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the initial weights")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run to repeat")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    config = tomllib.loads((options.run / "config.toml").read_text())
    model = AutoModelForCausalLM.from_pretrained(options.model, attn_implementation="sdpa").train()
    started = time.monotonic()
    validation = train(model, config=config)
    seconds = time.monotonic() - started
    options.output.write_text(json.dumps({"validation": validation, "seconds": seconds}))


if __name__ == "__main__":
    main()
