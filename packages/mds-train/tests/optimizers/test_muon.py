"""Muon on one process against torch's, and against the singular vectors that it approximates."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from mds_train.config import OptimizerConfig
from mds_train.optimizers.building import build_optimizer
from mds_train.optimizers.muon import Muon, orthogonalized, step_scale

SHAPES = {"a": (16, 8), "b": (8, 24), "c": (12, 12)}


def named_parameters() -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(3)
    matrices = [
        (f"decoder.layers.0.{name}.weight", nn.Parameter(torch.randn(shape, generator=generator)))
        for name, shape in SHAPES.items()
    ]
    rest = [
        ("embedding.word_embeddings.weight", nn.Parameter(torch.ones(9, 8))),
        ("decoder.layers.0.a.bias", nn.Parameter(torch.ones(16))),
    ]
    return [*matrices, *rest]


def in_place(stepped: Sequence[Tensor], updates: Sequence[Tensor]) -> None:
    """What the engine does with matrices that no rank shares, in bf16 as torch.optim.Muon."""
    for tensor, update in zip(stepped, updates, strict=True):
        found = orthogonalized(update, dtype=torch.bfloat16).float()
        update.copy_(found * step_scale(tensor.shape))


def test_steps_are_those_of_torchs_muon_and_adamw() -> None:
    ours, theirs = named_parameters(), named_parameters()
    config = OptimizerConfig(name="muon", lr=0.02, weight_decay=0.1)
    optimizer = build_optimizer(ours, config=config)
    assert isinstance(optimizer, Muon)
    optimizer.use(in_place)
    muon = torch.optim.Muon(
        [parameter for _, parameter in theirs[:3]],
        lr=0.02,
        weight_decay=0.1,
        momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
    )
    decayed = {"params": [theirs[3][1]], "weight_decay": 0.1}
    adam = torch.optim.AdamW(
        [decayed, {"params": [theirs[4][1]], "weight_decay": 0.0}], lr=0.02, betas=(0.9, 0.95)
    )
    generator = torch.Generator().manual_seed(5)

    for _ in range(4):
        for (_, one), (_, other) in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        optimizer.step()
        muon.step()
        adam.step()

    for (name, one), (_, other) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, msg=name)
        assert not torch.equal(one, dict(named_parameters())[name])


@pytest.mark.parametrize("shape", [(40, 24), (24, 40)])
def test_the_result_has_the_singular_vectors_and_values_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)

    found = orthogonalized(matrix, dtype=torch.float32).double()

    values = left.T @ found @ right.T
    assert values.diagonal().min() > 0.5
    assert values.diagonal().max() < 1.3
    assert (values - values.diagonal().diag()).abs().max() < 1e-5
    exact = orthogonalized(matrix, dtype=torch.float64)
    assert (found - exact).norm() / exact.norm() < 1e-5


def test_nothing_is_stepped_before_matrices_can_be_put_together() -> None:
    parameters = named_parameters()
    optimizer = build_optimizer(parameters, config=OptimizerConfig(name="muon"))
    for _, parameter in parameters:
        parameter.grad = torch.ones_like(parameter)

    optimizer.step()

    for (_, parameter), (name, before) in zip(parameters, named_parameters(), strict=True):
        assert torch.equal(parameter, before), name
    assert not optimizer.state
