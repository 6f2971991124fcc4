"""The real Megatron-core loads: ``python core_model.py FOLDER TOKENS.npz OUT.npz RENDEZVOUS``.

Two tensor-parallel ranks on the CPU build the model of the golden ``torch_dist`` set, load its
weights from FOLDER, and write the logits of the tokens.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import numpy as np
import torch

RANKS, LAYERS, HIDDEN, HEADS, WORDS, LENGTH = 2, 3, 32, 4, 128, 64


def without_cuda() -> None:
    """Megatron-core asks CUDA for the time and the device even on a CPU."""
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]


def build(positions: int) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=RANKS,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=WORDS,
        max_sequence_length=positions,
        parallel_output=False,
        share_embeddings_and_output_weights=True,
    ).eval()


def main(rank: int, folder: str, tokens: str, out: str, meeting: str) -> None:
    without_cuda()
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank))
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()  # no dropout, no state
    with np.load(tokens) as archive:
        ids = torch.from_numpy(archive["tokens"])
        positions = int(archive["positions"])
    model = build(positions)
    wanted = model.sharded_state_dict(prefix="")
    state = dist_checkpointing.load(wanted, folder)
    model.load_state_dict({k: v for k, v in state.items() if k in model.state_dict()}, strict=False)
    places = torch.arange(ids.shape[1]).expand_as(ids)
    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
    with torch.no_grad():
        logits = model(ids, places, mask)
    if rank == 0:
        args = dist_checkpointing.load_common_state_dict(folder).get("args")
        heads = 0 if args is None else args.num_attention_heads  # a test of its own stores none
        np.savez(out, logits=logits.numpy(), heads=heads)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, tuple(sys.argv[1:]), nprocs=RANKS)
