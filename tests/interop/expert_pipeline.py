"""Ranks of the real DeepSpeed with experts in a pipeline: train and save, or load ours and go on.

Run as ``python expert_pipeline.py JOBS.json RENDEZVOUS``; starts its four ranks itself, two stages
times two data-parallel ranks. A job names folders: ``load`` from, or
``save`` to after two steps, and ``then`` after one step more; ``ep`` is how many ranks share out
the experts, 2 if it names none. With ``universal``, what is loaded is a universal checkpoint, and
``again`` is where it is saved at once.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Mapping
from itertools import repeat
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from plain_engine import HEADS, HIDDEN, LENGTH, ROWS, WIDTH, WORDS, Block
from real_megatron import pretend_megatron
from torch import nn
from torch.nn import functional

LAYERS, STAGES, EXPERTS, RANKS = 4, 2, 4, 4


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(ROWS, HIDDEN)
        self.position_embeddings = nn.Embedding(LENGTH, HIDDEN)

    @property
    def word_embeddings_weight(self) -> torch.Tensor:
        return self.word_embeddings.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.word_embeddings(tokens) + self.position_embeddings.weight[: tokens.shape[1]]


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float()[..., :WORDS].reshape(-1, WORDS), labels.view(-1))


def pipeline(ep: int) -> PipelineModule:
    """Megatron-DeepSpeed's pipeline with experts in every second layer, numbered as there."""
    tied = {"tied_weight_attr": "word_embeddings_weight"}
    head = {"forward_fn": lambda module, x: x @ module.word_embeddings.weight.t(), **tied}
    counts = [EXPERTS if layer % 2 else 0 for layer in range(LAYERS)]
    blocks = [LayerSpec(Block, experts=n, ep=ep, residual=False) for n in counts]
    layers = [lambda x: x, TiedLayerSpec("embed", Embedding, **tied), *blocks]
    layers.append(lambda x: x)  # where Megatron-DeepSpeed keeps the experts' loss
    layers += [LayerSpec(nn.LayerNorm, HIDDEN), TiedLayerSpec("embed", Embedding, **head)]
    return PipelineModule(
        layers, num_stages=STAGES, loss_fn=cross_entropy, partition_method="type:Block"
    )


def engine_of(job: Mapping[str, Any], seed: int) -> Any:
    torch.manual_seed(seed)
    net = pipeline(job.get("ep", 2))
    parameters = list(net.parameters())
    decayed, plain = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]
    groups = split_params_into_different_moe_groups_for_optimizer(
        [
            {"name": "wd", "params": decayed, "weight_decay": 0.1},
            {"name": "no_wd", "params": plain, "weight_decay": 0.0},
        ]
    )
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "checkpoint": {"load_universal": bool(job.get("universal"))},
    }
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]


def arguments(job: Mapping[str, Any]) -> Namespace:
    return Namespace(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=WIDTH,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        make_vocab_size_divisible_by=8,
        padded_vocab_size=ROWS,
        bf16=True,
        params_dtype=torch.bfloat16,
        add_bias_linear=True,
        num_experts=[EXPERTS],
        expert_interval=2,
        topk=1,
        mlp_type="standard",
        moe_token_dropping=False,
        moe_expert_parallel_size=job.get("ep", 2),
        pipeline_model_parallel_size=STAGES,
        tensor_model_parallel_size=1,
    )


def train(engine: Any, rank: int, *, steps: int) -> None:
    for step in range(engine.global_steps, engine.global_steps + steps):
        generator = torch.Generator().manual_seed(100 * step + rank % 2)
        tokens = torch.randint(0, WORDS, (2, LENGTH), generator=generator)
        engine.train_batch(data_iter=repeat((tokens, tokens)))


def save(engine: Any, job: Mapping[str, Any], folder: str) -> None:
    state = {"args": arguments(job), "checkpoint_version": 3.0, "iteration": engine.global_steps}
    engine.save_checkpoint(folder, client_state=state)


def work(job: Mapping[str, Any], rank: int) -> None:
    engine = engine_of(job, seed=7 if "load" in job else 3)
    if "load" in job:
        path, client = engine.load_checkpoint(job["load"])
        assert path is not None
        assert client["iteration"] == engine.global_steps == 2
        if "again" in job:
            save(engine, job, job["again"])
    else:
        train(engine, rank, steps=2)
        save(engine, job, job["save"])
    train(engine, rank, steps=1)
    save(engine, job, job["then"])


def main(rank: int, jobs: str, rendezvous: str) -> None:
    pretend_megatron()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS
    )
    deepspeed.init_distributed("gloo")
    for job in json.loads(Path(jobs).read_text()):
        work(job, rank)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, tuple(sys.argv[1:]), nprocs=RANKS)
