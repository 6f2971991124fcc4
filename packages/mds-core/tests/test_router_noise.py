"""What a router draws has the distribution that it should have, whoever draws it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from core_cells import MIXTRAL, PR_MOE, Cell, build

from mds_core.groups import ProcessGroups
from mds_core.layers.router_noise import NoisePlace, gumbel, jittered
from mds_core.layers.routing import choose
from mds_core.rng import DropoutKey

SAMPLES, POSITIONS, EXPERTS = 500, 16, 4


def place(samples: torch.Tensor, *rows: range, layer: int = 2) -> NoisePlace:
    return NoisePlace(DropoutKey(seed=3, samples=samples), layer, rows or (range(POSITIONS),))


def choices(*, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same scores for all of many tokens, and the experts that they draw."""
    scores = torch.tensor([1.0, -0.5, 0.3, 0.0], dtype=torch.float64)
    noise = gumbel(place(torch.arange(SAMPLES)), experts=EXPERTS)
    _, choice = choose(scores.expand(SAMPLES, POSITIONS, -1), topk=topk, noise=noise)
    return scores, choice.experts.flatten(0, 1)


def assert_shares(drawn: torch.Tensor, expected: torch.Tensor) -> None:
    """Four standard deviations of a share of so many draws."""
    shares = torch.bincount(drawn, minlength=EXPERTS) / len(drawn)
    assert ((shares - expected).abs() <= 4 * (expected * (1 - expected) / len(drawn)).sqrt()).all()


def test_one_expert_is_drawn_by_its_probability() -> None:
    scores, experts = choices(topk=1)

    assert_shares(experts[:, 0], scores.softmax(0))


def test_the_second_expert_is_drawn_among_the_others() -> None:
    scores, experts = choices(topk=2)

    others = scores.clone()
    others[0] = -torch.inf
    assert (experts[:, 0] == 0).all()
    assert_shares(experts[:, 1], others.softmax(0))


def test_the_numbers_of_a_part_are_the_part_of_the_numbers() -> None:
    samples = torch.tensor([7, 2**40 + 1, 9])
    whole = gumbel(place(samples), experts=EXPERTS)

    part = gumbel(place(samples[1:], range(12, 16), range(2)), experts=EXPERTS)

    assert torch.equal(part, whole[1:][:, [12, 13, 14, 15, 0, 1]])
    assert not torch.equal(whole, gumbel(place(samples, layer=3), experts=EXPERTS))


def test_jitter_stays_within_a_percent() -> None:
    ones = torch.ones(SAMPLES, POSITIONS, 8)

    shaken = jittered(ones, place(torch.arange(SAMPLES)))

    assert 0.99 <= shaken.min() < 0.9902
    assert 1.0098 < shaken.max() <= 1.01
    assert shaken.mean().item() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        replace(MIXTRAL, moe_sample_second=True),
        replace(MIXTRAL, moe_noise="jitter"),
        replace(PR_MOE, moe_noise="rsample"),
        replace(
            PR_MOE,
            moe_drop_policy="random",
            moe_capacity_factor=0.5,
            moe_eval_capacity_factor=0.5,
            moe_min_capacity=1,
        ),
    ],
)
def test_a_router_draws_in_training_only(config) -> None:
    model = build(Cell(config=config), ProcessGroups.single())
    tokens = torch.arange(16)[None]
    keys = [DropoutKey(seed=1, samples=torch.tensor([sample])) for sample in (0, 1)]

    one, other = (model(tokens, dropout_key=key) for key in keys)
    with pytest.raises(ValueError, match="or a router that draws, so forward needs a dropout_key"):
        model(tokens)

    assert not torch.equal(one, other)
    assert torch.equal(one, model(tokens, dropout_key=keys[0]))
    assert torch.equal(model.eval()(tokens), model(tokens, dropout_key=keys[1]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_noise": "rsample"}, 'moe_noise="rsample" draws the one expert'),
        ({"moe_topk": 1, "moe_sample_second": True}, "moe_sample_second draws the second"),
        ({"moe_noise": "gauss"}, "choose one of none, rsample, jitter"),
    ],
)
def test_what_cannot_be_drawn_is_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        replace(MIXTRAL, **changes)
