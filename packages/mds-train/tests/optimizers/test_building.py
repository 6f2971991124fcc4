from __future__ import annotations

import pytest
import torch
from torch import nn

from mds_train.config import OptimizerConfig
from mds_train.optimizers.building import (
    build_optimizer,
    parameter_groups,
    set_hyperparameters,
)
from mds_train.optimizers.kinds import DECAYED, MATRICES, UNDECAYED
from mds_train.optimizers.lion import Lion


def parameters() -> list[tuple[str, nn.Parameter]]:
    return [
        ("mlp.weight", nn.Parameter(torch.ones(2, 3))),
        ("mlp.bias", nn.Parameter(torch.ones(2))),
        ("norm.weight", nn.Parameter(torch.ones(3))),
    ]


def test_matrices_are_decayed_and_biases_and_norms_are_not() -> None:
    groups = parameter_groups(parameters(), weight_decay=0.1)

    assert [(g["name"], g["names"], g["weight_decay"]) for g in groups] == [
        (DECAYED, ["mlp.weight"], 0.1),
        (UNDECAYED, ["mlp.bias", "norm.weight"], 0.0),
    ]


def test_muon_has_the_matrices_of_layers_and_no_embedding_head_or_router() -> None:
    named = {
        "embedding.word_embeddings.weight": (8, 4),
        "decoder.layers.0.self_attention.linear_qkv.weight": (12, 4),
        "decoder.layers.0.self_attention.linear_qkv.bias": (12,),
        "decoder.layers.0.mlp.router.weight": (3, 4),
        "decoder.layers.0.input_layernorm.weight": (4,),
        "output_layer.weight": (8, 4),
    }
    parameters = [(name, nn.Parameter(torch.ones(shape))) for name, shape in named.items()]

    groups = parameter_groups(parameters, weight_decay=0.1, muon=True)

    assert [(group["kind"], len(group["names"])) for group in groups] == [
        (MATRICES, 1),
        (DECAYED, 3),
        (UNDECAYED, 2),
    ]
    assert groups[0]["names"] == ["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert groups[0]["weight_decay"] == 0.1


def test_experts_that_ranks_share_out_have_groups_of_their_own() -> None:
    groups = parameter_groups(parameters(), weight_decay=0.1, experts={"mlp.weight", "mlp.bias"})

    assert [(g["kind"], g["expert"], g["names"], g["weight_decay"]) for g in groups] == [
        (UNDECAYED, False, ["norm.weight"], 0.0),
        (DECAYED, True, ["mlp.weight"], 0.1),
        (UNDECAYED, True, ["mlp.bias"], 0.0),
    ]


def test_a_group_without_parameters_is_left_out() -> None:
    assert [g["name"] for g in parameter_groups(parameters()[:1], weight_decay=0.1)] == [DECAYED]


def test_the_schedule_writes_into_the_groups() -> None:
    optimizer = build_optimizer(parameters(), config=OptimizerConfig(weight_decay=0.1))

    set_hyperparameters(optimizer, lr=0.5, weight_decay=0.2)

    found = [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert found == [(0.5, 0.2), (0.5, 0.0)]


def test_adam_is_the_published_one_and_goes_on_with_its_count_of_steps() -> None:
    """One scalar, lr 0.1: published values after each step."""
    expected = [0.900000002, 0.8067820404774624, 0.7104859883982625, 0.6172680268757247]
    parameter = nn.Parameter(torch.ones(1, dtype=torch.float64))
    config = OptimizerConfig(lr=0.1, beta1=0.9, beta2=0.999, weight_decay=0.0)
    optimizer = build_optimizer([("x", parameter)], config=config)

    values = []
    for step in range(4):
        parameter.grad = torch.full_like(parameter, 0.5 if step % 2 == 0 else 0.25)
        optimizer.step()
        values.append(parameter.item())

    assert values == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("config", "kind", "values"),
    [
        (OptimizerConfig(), torch.optim.AdamW, {"betas": (0.9, 0.95), "eps": 1e-8}),
        (OptimizerConfig(name="lion", beta2=0.99), Lion, {"betas": (0.9, 0.99)}),
        (OptimizerConfig(name="sgd", momentum=0.8), torch.optim.SGD, {"momentum": 0.8}),
    ],
)
def test_the_optimizer_is_the_one_that_is_named(
    config: OptimizerConfig, kind: type, values: dict[str, object]
) -> None:
    optimizer = build_optimizer(parameters(), config=config)

    assert type(optimizer) is kind
    for group in optimizer.param_groups:
        assert {key: group[key] for key in values} == values
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
