"""What a product keeps and when it sends, found out on two tensor-parallel ranks."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from core_cells import LLAMA_GQA, Cell, build
from torch import nn
from torch.nn import functional as F

from mds_core.config import Execution
from mds_core.groups import Layout, ProcessGroups
from mds_core.layers.product import product
from mds_core.memory import again


def report() -> dict[str, dict]:
    groups = ProcessGroups.build(Layout(tp_size=2))
    split = Execution(sequence_parallel=True)
    kept = {
        "whole": bytes_kept(ProcessGroups.single(), Execution()),
        "tensor-parallel": bytes_kept(groups, Execution()),
        "sequence-parallel": bytes_kept(groups, split),
    }
    kinds = ("now", "later", "again")
    return {"kept": kept, "gathered": {kind: gathered(groups.tp, kind) for kind in kinds}}


def bytes_kept(groups: ProcessGroups, execution: Execution) -> int:
    """What the layers of a Llama keep of their activations."""
    model = build(Cell(config=LLAMA_GQA, execution=execution), groups)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes: dict[int, tuple[torch.Tensor, int]] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        sizes[x.untyped_storage().data_ptr()] = (x, x.untyped_storage().nbytes())
        return x

    positions = torch.arange(16)[None]
    context = model._context(positions, None, None, None)
    hidden = torch.randn(3, len(context.rows[0]), 32, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        result = model.decoder(hidden, context)
    del result
    shared = {tensor.untyped_storage().data_ptr() for tensor in context.rotation}
    return sum(size for key, (_, size) in sizes.items() if key not in weights | shared)


def gathered(group: dist.ProcessGroup, kind: str) -> dict:
    """How often each pass gathers, and how far the gradients are from the whole product's."""
    generator = torch.Generator().manual_seed(3)
    x, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, generator=generator)
        for shape in ((2, 8, 6), (10, 6), (10,))
    )
    rank = group.rank()
    own = [nn.Parameter(t.chunk(2, d)[rank].clone()) for t, d in ((x, 1), (weight, 0), (bias, 0))]
    waiting = []
    later = waiting.append if kind == "later" else None
    with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as gather:

        def run(part: torch.Tensor) -> torch.Tensor:
            return product(part.sin(), own[1], own[2], group=group, later=later)

        y = again(run, own[0], active=kind == "again")
        counts = [gather.call_count]
        y.square().sum().backward()
        counts.append(gather.call_count)
        for closure in waiting:
            closure()
        counts.append(gather.call_count)
    wholes = [nn.Parameter(tensor) for tensor in (x, weight, bias)]
    F.linear(wholes[0].sin(), wholes[1], wholes[2]).square().sum().backward()
    wanted = [t.grad.chunk(2, d)[rank] for t, d in zip(wholes, (1, 0, 0), strict=True)]
    errors = [(a.grad - b).abs().max().item() for a, b in zip(own, wanted, strict=True)]
    return {"counts": counts, "error": max(errors)}
