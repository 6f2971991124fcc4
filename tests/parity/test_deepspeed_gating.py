"""The router chooses, weighs, drops and is charged as DeepSpeed's gating functions do."""

from __future__ import annotations

import pytest
import torch
from deepspeed.moe import sharded_moe

from mds_core.expert_plan import capacity
from mds_core.layers.router_noise import NoisePlace, gumbel, lots
from mds_core.layers.routing import Choice, balance_loss, choose, places, weights_of
from mds_core.rng import DropoutKey

TOKENS, EXPERTS = 48, 4


def scores(seed: int) -> torch.Tensor:
    """Uneven enough that some experts overflow."""
    generator = torch.Generator().manual_seed(seed)
    lean = torch.tensor([1.5, 0.5, 0.0, -1.0])
    return torch.randn(TOKENS, EXPERTS, generator=generator) + lean


def ours(logits, *, topk: int, factor: float | None, policy: str, choices: str, noise=None):
    """Weights [tokens, experts] and the loss."""
    drawn = None if noise is None else noise[None]
    probabilities, choice = choose(logits[None], topk=topk, noise=drawn)
    flat = Choice(choice.experts[0], choice.gates[0])
    kept = None
    if factor is not None:
        size = capacity(TOKENS, experts=EXPERTS, topk=topk, factor=factor, least=4)
        kept = places(flat, experts=EXPERTS, capacity=size, policy=policy)
    weights = weights_of(flat.gates, kept, normalize=topk > 1)
    dense = torch.zeros_like(logits).scatter(1, flat.experts, weights)
    loss = balance_loss(probabilities, choice.experts, scope="micro_batch", choices=choices)
    return dense, loss[0]


def noise_of(seed: int) -> torch.Tensor:
    """Our numbers [tokens, experts], which take the place of DeepSpeed's."""
    key = DropoutKey(seed=seed, samples=torch.tensor([seed]))
    return gumbel(NoisePlace(key, 0, (range(TOKENS),)), experts=EXPERTS)[0].float()


@pytest.fixture
def same_noise(monkeypatch):
    """Let DeepSpeed draw our numbers."""

    def draw(seed: int) -> None:
        monkeypatch.setattr(sharded_moe, "gumbel_rsample", lambda *_, **__: noise_of(seed))

    return draw


@pytest.mark.parametrize("seed", range(5))
def test_a_drawn_expert_of_every_token(seed, same_noise) -> None:
    same_noise(seed)
    theirs = sharded_moe.top1gating(
        scores(seed), 1.0, 4, noisy_gate_policy="RSample", drop_tokens=False, use_rts=False
    )

    weights, loss = ours(
        scores(seed), topk=1, factor=None, policy="position", choices="all", noise=noise_of(seed)
    )

    torch.testing.assert_close(weights, theirs[1].sum(-1))
    torch.testing.assert_close(loss, theirs[0])


@pytest.mark.parametrize("seed", range(5))
def test_lots_for_the_places_of_an_expert(seed, monkeypatch) -> None:
    key = DropoutKey(seed=seed, samples=torch.tensor([seed]))
    place = NoisePlace(key, 0, (range(TOKENS),))
    every = torch.arange(EXPERTS).expand(1, TOKENS, -1)
    uniform = lots(place, every, count=EXPERTS)[0].float()
    device = torch.device("cpu")
    monkeypatch.setitem(sharded_moe.exp_selection_uniform_map, device, lambda _: uniform)
    theirs = sharded_moe.top1gating(scores(seed), 0.5, 4)

    _, choice = choose(scores(seed)[None], topk=1)
    flat = Choice(choice.experts[0], uniform.gather(-1, choice.experts[0]))
    size = capacity(TOKENS, experts=EXPERTS, topk=1, factor=0.5, least=4)
    kept = places(flat, experts=EXPERTS, capacity=size, policy="probability")

    assert kept.sum() < TOKENS
    assert torch.equal(kept[:, 0], theirs[2].any(-1).any(-1))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("factor", [None, 0.5])
def test_a_drawn_second_expert_of_every_token(seed, factor, same_noise) -> None:
    same_noise(seed)
    theirs = sharded_moe.top2gating(scores(seed), factor or 1.0, 4, drop_tokens=factor is not None)

    weights, loss = ours(
        scores(seed),
        topk=2,
        factor=factor,
        policy="position",
        choices="first",
        noise=noise_of(seed),
    )

    torch.testing.assert_close(weights, theirs[1].sum(-1))
    torch.testing.assert_close(loss, theirs[0])


@pytest.mark.parametrize("seed", range(5))
def test_the_best_expert_of_every_token(seed) -> None:
    theirs = sharded_moe.top1gating(scores(seed), 1.0, 4, drop_tokens=False, use_rts=False)

    weights, loss = ours(scores(seed), topk=1, factor=None, policy="position", choices="all")

    torch.testing.assert_close(weights, theirs[1].sum(-1))
    torch.testing.assert_close(loss, theirs[0])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("factor", [None, 1.0, 0.5])
def test_two_experts_of_every_token(seed, factor) -> None:
    theirs = sharded_moe.top2gating(
        scores(seed),
        factor or 1.0,
        4,
        drop_tokens=factor is not None,
        top2_2nd_expert_sampling=False,
    )

    weights, loss = ours(scores(seed), topk=2, factor=factor, policy="position", choices="first")

    torch.testing.assert_close(weights, theirs[1].sum(-1))
    torch.testing.assert_close(loss, theirs[0])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("factor", [None, 1.0, 0.5])
def test_three_experts_of_every_token(seed, factor) -> None:
    theirs = sharded_moe.topkgating(
        scores(seed), 3, factor or 1.0, 4, drop_tokens=factor is not None, drop_policy="probs"
    )

    weights, loss = ours(scores(seed), topk=3, factor=factor, policy="probability", choices="all")

    torch.testing.assert_close(weights, theirs[1].sum(-1))
    torch.testing.assert_close(loss, theirs[0])
