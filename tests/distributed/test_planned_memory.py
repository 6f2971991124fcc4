"""What a plan counts on fake tensors is what the ranks then keep."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mds_kernels.testing import run_ranks
from mds_train.config import TrainConfig
from mds_train.plan.activations import layer_bytes
from mds_train.recipes.catalogue import find_recipe
from mds_train.recipes.sizes import configuration_of

pytestmark = pytest.mark.timeout(240)


def really_saved(configs: list[TrainConfig]) -> list[int]:
    """Bytes that autograd keeps of the middle of three layers on this rank."""
    from mds_core import Layout, ProcessGroups
    from mds_core.models import GPT
    from mds_core.partition import Stage
    from mds_train.model_building import execution_of

    found = []
    for config in configs:
        parallel = config.parallel
        layout = Layout(tp_size=parallel.tp_size, ulysses_size=parallel.ulysses_size)
        model = GPT(
            config.model.core(),
            ProcessGroups.build(layout),
            stage=Stage(index=1, count=3, layers=range(1, 2)),
            execution=execution_of(config),
        )
        own = config.data.seq_length // parallel.ulysses_size
        own //= parallel.tp_size if parallel.sequence_parallel else 1
        hidden = torch.randn(2, own, config.model.hidden_size, requires_grad=True)
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        positions = torch.arange(config.data.seq_length)[None]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = model.forward_stage(hidden, position_ids=positions)
        del result
        sizes = {key: tensor.untyped_storage().nbytes() for key, tensor in kept.items()}
        found.append(sum(size for key, size in sizes.items() if key not in weights))
    return found


def test_two_ranks_keep_what_was_planned() -> None:
    configs = []
    for change in (
        {"tp_size": 2},
        {"tp_size": 2, "sequence_parallel": True},
        {"tp_size": 1, "ulysses_size": 2, "sequence_parallel": False},
    ):
        whole = configuration_of(find_recipe("llama3-8b"))
        model = replace(
            whole.model,
            num_layers=3,
            hidden_size=64,
            num_attention_heads=8,
            num_key_value_heads=4,
            ffn_hidden_size=176,
            vocab_size=100,
        )
        configs.append(
            replace(
                whole,
                model=model,
                data=replace(whole.data, seq_length=32),
                train=replace(
                    whole.train, precision="fp32", micro_batch_size=2, global_batch_size=4
                ),
                parallel=replace(whole.parallel, **({"sequence_parallel": False} | change)),
                memory=replace(whole.memory, recompute="none"),
            )
        )
    planned = [layer_bytes(config) for config in configs]

    for found in run_ranks(really_saved, 2, configs):
        assert found == pytest.approx(planned, rel=0.01)
