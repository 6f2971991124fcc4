"""The real Megatron-core saves: ``python core_kinds.py KIND FOLDER OUT.npz RENDEZVOUS``.

Two ranks on the CPU build a small model of a kind, save it as a ``torch_dist`` checkpoint into
FOLDER, and write each rank's own state and the model's logits. Kinds are ``experts`` (Mixtral-like,
shared out over the ranks), ``some`` (experts in every second layer and beside them an MLP for all
tokens), ``singles`` (as newer versions store them, each by itself) and ``bert`` (cut over the
ranks). With ``load`` in KIND's place, what lies in FOLDER is loaded into an ``experts`` model.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from core_model import without_cuda

RANKS, LAYERS, HIDDEN, HEADS, GROUPS, WIDTH, WORDS, LENGTH = 2, 2, 16, 4, 2, 24, 64, 12


def config_of(kind: str) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    common = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": WIDTH,
        "use_cpu_initialization": True,
        "pipeline_dtype": torch.float32,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "init_method_std": 0.2,
    }
    if kind == "bert":
        return TransformerConfig(**common, tensor_model_parallel_size=RANKS)
    some = {"moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": 8}
    return TransformerConfig(
        **common,
        **(some if kind == "some" else {}),
        num_query_groups=GROUPS,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=WIDTH,
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none",
        expert_model_parallel_size=RANKS,
    )


def build(kind: str) -> Any:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = config_of(kind)
    if kind == "bert":
        return BertModel(
            config,
            num_tokentypes=2,
            transformer_layer_spec=bert_layer_local_spec,
            vocab_size=WORDS,
            max_sequence_length=LENGTH,
            parallel_output=False,
        ).eval()
    spec = get_gpt_layer_local_spec(num_experts=4, normalization="RMSNorm")
    if kind == "load":
        # With Transformer Engine, which nobody trains experts without, the norm keeps its name.
        del spec.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    if kind == "some":
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    return GPTModel(
        config,
        transformer_layer_spec=spec,
        vocab_size=WORDS,
        max_sequence_length=LENGTH,
        parallel_output=False,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).eval()


def logits_of(model: Any, kind: str, ids: torch.Tensor) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        if kind == "bert":
            mask = torch.ones_like(ids)
            return model(ids, mask, tokentype_ids=torch.zeros_like(ids))[0].float().numpy()
        places = torch.arange(ids.shape[1]).expand_as(ids)
        mask = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        return model(ids, places, mask).float().numpy()


def main(rank: int, kind: str, folder: str, out: str, meeting: str) -> None:
    without_cuda()
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 forgets it without Transformer Engine
        moe_utils.te_general_gemm = None

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank))
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS
    )
    degrees = "tensor" if kind == "bert" else "expert"
    parallel_state.initialize_model_parallel(**{f"{degrees}_model_parallel_size": RANKS})
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()  # no dropout, no state
    torch.manual_seed(11)
    model = build(kind)
    metadata = {"singleton_local_shards": True} if kind == "singles" else None
    wanted = model.sharded_state_dict(prefix="", metadata=metadata)
    if kind == "load":
        state = dist_checkpointing.load(wanted, folder)
        model.load_state_dict(state, strict=False)
    else:
        spread(model, kind, rank)
        Path(folder).mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(wanted, folder)
    ids = torch.randint(0, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    logits = logits_of(model, kind, ids)
    state = {k: v.float().numpy() for k, v in model.state_dict().items() if torch.is_tensor(v)}
    np.savez(f"{out}.{rank}.npz", **state, tokens=ids.numpy(), logits=logits)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def spread(model: Any, kind: str, rank: int) -> None:
    """Give every parameter values of its own, norms and biases too; copies stay equal."""
    for number, (name, parameter) in enumerate(model.named_parameters()):
        is_cut = ".experts." in name
        if kind == "bert":
            is_cut = getattr(parameter, "tensor_model_parallel", False)
        generator = torch.Generator().manual_seed(97 * number + (31 * rank if is_cut else 0))
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = (noise * 0.2 + (1.0 if "norm" in name and "weight" in name else 0.0)).to(
            parameter.dtype
        )


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, tuple(sys.argv[1:]), nprocs=RANKS)
