"""A student beside a teacher of another shape, on the ranks that run now."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from core_cells import GPT2, LLAMA_GQA, batch

from mds_core.groups import Layout, ProcessGroups
from mds_core.models import GPT, Distillation, DistilledGPT
from mds_core.rng import DropoutKey

TEACHER = replace(GPT2, vocab_size=LLAMA_GQA.vocab_size, make_vocab_size_divisible_by=16)


def distil(groups: ProcessGroups) -> dict:
    """Losses and gradients of a student of one shape and a teacher of another."""
    student = DistilledGPT(LLAMA_GQA, groups, seed=7, dtype=torch.float64)
    student.set_teacher(
        GPT(TEACHER, groups, seed=9, dtype=torch.float64),
        Distillation(alpha=0.5, beta=0.7, temperature=1.5),
    )
    tokens, labels, mask = batch(LLAMA_GQA, 0)
    key = DropoutKey(seed=1, samples=torch.arange(3))
    found = student(tokens, labels, loss_mask=mask, dropout_key=key)
    (found.loss_sum + found.divergence_sum).backward()
    for parameter in student.parameters():
        if groups.ulysses is not None:
            dist.all_reduce(parameter.grad, group=groups.ulysses)
    names = ("decoder.final_layernorm.weight", "decoder.layers.0.input_layernorm.weight")
    gradients = {name: student.get_parameter(name).grad for name in names}
    return {
        "sums": torch.stack([found.loss_sum, found.divergence_sum]).detach(),
        "losses": found.losses,
        "divergences": found.divergences,
        **gradients,
    }


def on_two_ranks() -> dict[str, dict]:
    return {
        "tp": distil(ProcessGroups.build(Layout(tp_size=2))),
        "ulysses": distil(ProcessGroups.build(Layout(ulysses_size=2))),
    }
