"""What Megatron's distributed optimizer keeps: a flat buffer for each state and model chunk.

Megatron gives its first parameter the end of the buffer, so they lie in the reverse of the order in
which the model registers them; behind them the buffer is padded to the data-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mds_ckpt.megatron.target_groups import Member, ParameterGroup
from mds_ckpt.megatron.target_ranks import MOMENTS, RankedTarget
from mds_ckpt.megatron.target_zero import FlatTensor, Run
from mds_ckpt.pickles.records import TorchDtype

__all__ = ["buffers", "settings_alone"]


def buffers(
    target: RankedTarget, chunks: Sequence[Sequence[Member]], rank: int
) -> dict[int, dict[TorchDtype, dict[str, FlatTensor]]]:
    """The file ``distrib_optim.pt`` of a model-parallel rank.

    Args:
        target: The target.
        chunks: The parameters of each model chunk, in the order of the model.
        rank: Tensor-parallel rank.
    """
    main = "weight" if target.dtype == "F32" else "master"
    words = {"param": main, **{moment: moment for moment in MOMENTS}}
    # Buffers are called by the type of the gradients, which is half only in fp16, and by choice.
    args = target.args().fields
    is_half = target.dtype == "F16" and not args.get("accumulate_allreduce_grads_in_fp32")
    kind = TorchDtype("float16" if is_half else "float32")
    return {
        number: {kind: {word: _flat(target, chunk, rank, state) for word, state in words.items()}}
        for number, chunk in enumerate(chunks)
    }


def _flat(target: RankedTarget, chunk: Sequence[Member], rank: int, state: str) -> FlatTensor:
    runs: list[Run] = []
    for member in reversed(chunk):
        tensor = target.local(member.named, rank, state)
        count = math.prod(tensor.shape)
        runs.append((tensor, 0, count, count))
    total = sum(count for *_, count in runs)
    if padding := -total % target.layout.dp_size:
        runs.append((None, 0, 0, padding))
    return FlatTensor(runs, "F32")


def settings_alone(target: RankedTarget, groups: Sequence[ParameterGroup]) -> Mapping[str, Any]:
    """What the model file keeps of it: the groups' settings, without parameters and their state."""
    step = target.optimizer_step
    return {
        "optimizer": {"param_groups": [{**target.settings(g), "step": step} for g in groups]},
    }
