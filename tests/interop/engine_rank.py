"""A rank of the real DeepSpeed: load a checkpoint, compare with what was to be in it, train a step.

Run as ``python engine_rank.py CHECKPOINT STAGES EXPECTED.npz RENDEZVOUS``; starts its ranks itself.
"""

from __future__ import annotations

import os
import sys
from itertools import repeat
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from real_megatron import pretend_megatron
from torch import nn
from torch.nn import functional

HIDDEN, WIDTH, LAYERS, ROWS, LENGTH, HEADS = 32, 128, 4, 640, 64, 4
RENAMED = {
    "query_key_value": "linear_qkv",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "dense_h_to_4h": "linear_fc1",
    "dense_4h_to_h": "linear_fc2",
    "self_attention.dense": "self_attention.linear_proj",
}


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
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(HIDDEN)
        self.self_attention = Attention()
        self.post_attention_layernorm = nn.LayerNorm(HIDDEN)
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


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
    return functional.cross_entropy(logits.float().view(-1, ROWS), labels.view(-1))


def pipeline(stages: int) -> PipelineModule:
    """The layers of Megatron-DeepSpeed's GPTModelPipe, with the same numbers and names."""
    tied = {"tied_weight_attr": "word_embeddings_weight"}
    head = {"forward_fn": lambda module, x: x @ module.word_embeddings.weight.t(), **tied}
    layers = [lambda x: x, TiedLayerSpec("embed", Embedding, **tied)]
    layers += [LayerSpec(Block) for _ in range(LAYERS)]
    layers += [LayerSpec(nn.LayerNorm, HIDDEN), TiedLayerSpec("embed", Embedding, **head)]
    return PipelineModule(
        layers, num_stages=stages, loss_fn=cross_entropy, partition_method="type:Block"
    )


def engine_of(net: PipelineModule) -> Any:
    parameters = list(net.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
    }
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]


def canonical(name: str) -> str:
    """Canonical name of a parameter of the pipeline."""
    if name.startswith("tied_modules.embed."):
        return name.replace("tied_modules.embed", "embedding")
    number, _, rest = name.partition(".")
    for theirs, ours in RENAMED.items():
        rest = rest.replace(theirs, ours)
    layer = int(number) - 2
    if layer == LAYERS:
        return f"decoder.final_layernorm.{rest}"
    return f"decoder.layers.{layer}.{rest}"


def compare(net: PipelineModule, engine: Any, expected: Any) -> int:
    """Assert that all parameters and their optimizer state are as written; returns how many."""
    engine.optimizer._lazy_init_hp_params_optimizer_state()
    count = 0
    for stored, parameter in net.named_parameters():
        name = canonical(stored)
        if "position" in name and not engine.is_first_stage():
            continue  # the last stage's copy is neither used nor stored
        states = {
            "weight": parameter.detach().float(),
            "master": safe_get_full_fp32_param(parameter),
            "exp_avg": safe_get_full_optimizer_state(parameter, "exp_avg"),
            "exp_avg_sq": safe_get_full_optimizer_state(parameter, "exp_avg_sq"),
        }
        for state, tensor in states.items():
            wanted = expected[f"{state}/{name}"]
            assert (tensor.numpy()[: len(wanted)] == wanted).all(), (name, state)
        count += 1
    return count


def main(rank: int, source: str, stages: int, npz: str, rendezvous: str) -> None:
    pretend_megatron()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(stages))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=stages
    )
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    net = pipeline(stages)
    engine = engine_of(net)
    path, client = engine.load_checkpoint(source, load_lr_scheduler_states=False)
    assert path is not None
    assert client["iteration"] == engine.global_steps == 10
    with np.load(npz) as expected:
        count = compare(net, engine, expected)
    assert count
    batch = torch.randint(0, 600, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    loss = float(engine.train_batch(data_iter=repeat((batch, batch))))
    assert np.isfinite(loss)
    sys.stdout.write(f"rank {rank}: {count} parameters as written, step {engine.global_steps}\n")
    sys.stdout.flush()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    folder, count, npz, meeting = sys.argv[1:]
    arguments = (str(Path(folder)), int(count), npz, meeting)
    torch.multiprocessing.spawn(main, arguments, nprocs=int(count))
