"""Puts low-rank adapters beside a model's linear layers and freezes everything else."""

from __future__ import annotations

import re

from mds_core.config.adapters import ADAPTED, AdapterConfig
from mds_core.layers.linear import ColumnParallelLinear, RowParallelLinear
from mds_core.models.gpt import GPT
from mds_core.parameter import initialize

__all__ = ["add_adapters"]

_LAYER = re.compile(rf"decoder\.layers\.(\d+)\.\w+\.({'|'.join(ADAPTED)})")


def add_adapters(model: GPT, config: AdapterConfig) -> None:
    """Add adapters, which alone are trained from then on; the model computes what it did before.

    Args:
        model: A whole model, or a rank's share of one; on ``"meta"`` nothing is allocated.
        config: Which adapters.

    Raises:
        ValueError: If a wanted layer is an expert's, or dropout meets chunks of a sequence.
    """
    if config.dropout and model.execution.sequence_chunk is not None:
        raise ValueError(
            f"adapters drop by position ({config.dropout}), which a model that computes in chunks "
            f"(sequence_chunk {model.execution.sequence_chunk}) does not know; set dropout 0."
        )
    experts = {"linear_fc1", "linear_fc2"} & set(config.targets)
    if experts and any(model.config.experts):
        raise ValueError(
            f"experts have no adapters, but the targets have {', '.join(sorted(experts))}; adapt "
            f"linear_qkv and linear_proj alone."
        )
    model.requires_grad_(requires_grad=False)
    for name, module in list(model.named_modules()):
        found = _LAYER.fullmatch(name)
        if found is None or found[2] not in config.targets:
            continue
        assert isinstance(module, ColumnParallelLinear | RowParallelLinear)
        module.add_adapter(config, layer=int(found[1]), site=found[2])  # type: ignore[arg-type]
    model.adapter_dropout = config.dropout
    if next(model.parameters()).device.type != "meta":
        initialize(model, seed=model.seed, only=trained_names(model))


def trained_names(model: GPT) -> frozenset[str]:
    """Names of the parameters that are not frozen."""
    return frozenset(name for name, each in model.named_parameters() if each.requires_grad)
