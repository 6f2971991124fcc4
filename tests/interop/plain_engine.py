"""Ranks of the real DeepSpeed without pipeline: train and save, or load what we wrote and go on.

Run as ``python plain_engine.py RANKS JOBS.json RENDEZVOUS``; starts its ranks itself. A job names a
``stage``, a ``dtype``, how many ``experts`` the model has (and ``ep``, the ranks that share them),
and folders: ``load`` from, ``save`` to after ``steps``, and ``then`` after one step more. With
``universal``, what is loaded is a universal checkpoint; ``again`` is where it is saved at once.
With ``frozen``, parameters whose names begin so are not trained; ``values`` is a file for all
parameters as DeepSpeed gathers them at ``save``.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from real_megatron import pretend_megatron
from torch import nn
from torch.nn import functional

HIDDEN, WIDTH, LAYERS, WORDS, ROWS, LENGTH, HEADS = 16, 40, 3, 50, 56, 12, 4
LINEAR = functional.linear
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.dense = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        rows = self.query_key_value(x).view(batch, length, HEADS, 3, HIDDEN // HEADS)
        query, key, value = rows.permute(3, 0, 2, 1, 4)
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.dense(y.transpose(1, 2).reshape(batch, length, HIDDEN))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(HIDDEN, WIDTH)
        self.dense_4h_to_h = nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense_4h_to_h(functional.gelu(self.dense_h_to_4h(x)))


class Block(nn.Module):
    def __init__(self, *, experts: int, ep: int, residual: bool) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(HIDDEN)
        self.self_attention = Attention()
        self.post_attention_layernorm = nn.LayerNorm(HIDDEN)
        self.mlp: nn.Module = Mlp()
        if experts:
            options = {"k": 1, "drop_tokens": False, "use_rts": False, "use_residual": residual}
            self.mlp = MoE(HIDDEN, Mlp(), num_experts=experts, ep_size=ep, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        y = self.mlp(self.post_attention_layernorm(x))
        return x + (y[0] if isinstance(y, tuple) else y)


class Stack(nn.Module):
    def __init__(self, *, experts: int, ep: int, residual: bool) -> None:
        super().__init__()
        counts = [experts if layer % 2 else 0 for layer in range(LAYERS)]
        self.layers = nn.ModuleList(Block(experts=n, ep=ep, residual=residual) for n in counts)
        self.final_layernorm = nn.LayerNorm(HIDDEN)


class Model(nn.Module):
    """Megatron-DeepSpeed's GPTModel as its state dictionary names it."""

    def __init__(self, *, experts: int, ep: int, residual: bool) -> None:
        super().__init__()
        self.language_model = nn.Module()
        self.language_model.embedding = nn.Module()
        self.language_model.embedding.word_embeddings = nn.Embedding(ROWS, HIDDEN)
        self.language_model.embedding.position_embeddings = nn.Embedding(LENGTH, HIDDEN)
        self.language_model.encoder = Stack(experts=experts, ep=ep, residual=residual)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inner = self.language_model
        words = inner.embedding.word_embeddings
        x = (
            words(tokens[:, :-1])
            + inner.embedding.position_embeddings.weight[: tokens.shape[1] - 1]
        )
        for layer in inner.encoder.layers:
            x = layer(x)
        x = inner.encoder.final_layernorm(x)
        # Through the module, so that stage 3 gathers the weight.
        logits = functional.linear(x, words.weight).float()[..., :WORDS]
        return functional.cross_entropy(logits.reshape(-1, WORDS), tokens[:, 1:].reshape(-1))

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Megatron's dictionaries are nested; the experts that DeepSpeed adds are not."""
        return super().load_state_dict(dict(flatten(state)), strict=strict)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def arguments(job: Mapping[str, Any]) -> Namespace:
    experts = (
        {"num_experts": [job["experts"]], "expert_interval": 2, "topk": 1} if job["experts"] else {}
    )
    return Namespace(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=WIDTH,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        make_vocab_size_divisible_by=8,
        padded_vocab_size=ROWS,
        bf16=job["dtype"] == "bf16",
        fp16=job["dtype"] == "fp16",
        params_dtype=TYPES[job["dtype"]],
        add_bias_linear=True,
        mlp_type="residual" if job.get("residual") else "standard",
        moe_token_dropping=False,
        moe_expert_parallel_size=job.get("ep", 2) if job["experts"] else 1,
        **experts,
    )


def engine_of(job: Mapping[str, Any], seed: int) -> Any:
    torch.manual_seed(seed)
    options = {"experts": job["experts"], "ep": job.get("ep", 2)}
    net = Model(**options, residual=bool(job.get("residual")))
    for name, parameter in net.named_parameters():
        parameter.requires_grad = not name.startswith(tuple(job.get("frozen", ())))
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    decayed, plain = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"name": "wd", "params": decayed, "weight_decay": 0.1},
        {"name": "no_wd", "params": plain, "weight_decay": 0.0},
    ]
    if job["experts"]:
        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": job["stage"]},
    }
    if job["dtype"] == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    elif job["dtype"] == "bf16":
        config["bf16"] = {"enabled": True}
    if job.get("universal"):
        config["checkpoint"] = {"load_universal": True}
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, WORDS, (2, LENGTH), generator=generator)


def train(engine: Any, rank: int, *, first: int, steps: int) -> float:
    for step in range(first, first + steps):
        loss = engine(batch(step, rank))
        engine.backward(loss)
        engine.step()
    return float(loss)


def save(engine: Any, job: Mapping[str, Any], folder: str) -> None:
    state = {"args": arguments(job), "checkpoint_version": 3.0, "iteration": engine.global_steps}
    if not job["experts"]:  # with experts DeepSpeed keeps this name for itself
        sizes = {"original_vocab_size": WORDS, "padded_vocab_size": ROWS}
        state["universal_checkpoint_info"] = sizes
    engine.save_checkpoint(folder, client_state=state)


def keep_values(engine: Any, path: str) -> None:
    """Every parameter as the ranks hold it together, by the engine's name."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        pairs = engine.module.named_parameters()
        values = {name: parameter.detach().float().numpy() for name, parameter in pairs}
        if engine.global_rank == 0:
            np.savez(path, **values)


def work(job: Mapping[str, Any], rank: int) -> float:
    # DeepSpeed's stage 3 leaves a linear layer of its own here, for all that the process runs after
    # it; that one rounds otherwise, so a run in stage 1 would depend on what was run before it.
    functional.linear = LINEAR
    engine = engine_of(job, seed=7 if job.get("load") else 3)
    if job.get("load"):
        path, client = engine.load_checkpoint(job["load"])
        assert path is not None
        assert client["iteration"] == engine.global_steps
        if job.get("again"):
            save(engine, job, job["again"])
    else:
        train(engine, rank, first=0, steps=job["steps"])
        save(engine, job, job["save"])
        if job.get("values"):
            keep_values(engine, job["values"])
    loss = train(engine, rank, first=engine.global_steps, steps=1)
    save(engine, job, job["then"])
    engine.destroy()
    return loss


def main(rank: int, world: int, jobs: str, rendezvous: str) -> None:
    pretend_megatron()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    get_accelerator().is_fp16_supported = lambda: True
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world
    )
    deepspeed.init_distributed("gloo")
    for job in json.loads(Path(jobs).read_text()):
        loss = work(job, rank)
        if rank == 0:
            sys.stdout.write(f"{job['then']} {loss!r}\n")
            sys.stdout.flush()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    count, work_list, meeting = sys.argv[1:]
    torch.multiprocessing.spawn(main, (int(count), work_list, meeting), nprocs=int(count))
