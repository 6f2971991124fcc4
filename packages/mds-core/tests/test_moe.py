"""Experts against a plain loop over tokens; their losses and limits against the formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from core_cells import GPT2, MIXTRAL, PR_MOE, SHARED
from torch.nn import functional as F

from mds_core.config import Execution, GPTConfig
from mds_core.groups import Layout, ProcessGroups
from mds_core.layers.moe import MoE
from mds_core.layers.routing import Choice, balance_loss, choose, places, weights_of, z_loss
from mds_core.layers.side_loss import with_loss
from mds_core.models import GPT, RoutedLoss

SINGLE = ProcessGroups.single()


def build(config: GPTConfig, experts: int = 4) -> MoE:
    torch.manual_seed(0)
    layer = MoE(config, experts=experts, layer=0, groups=SINGLE, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
    return layer


def states(rows: int = 3) -> torch.Tensor:
    return torch.randn(
        rows, 16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def mlp(x: torch.Tensor, module, *, gated: bool) -> torch.Tensor:
    wide = F.linear(x, module.linear_fc1.weight, module.linear_fc1.bias)
    if gated:
        gate, up = wide.chunk(2, -1)
        wide = F.silu(gate) * up
    else:
        wide = F.gelu(wide, approximate="tanh")
    return F.linear(wide, module.linear_fc2.weight, module.linear_fc2.bias)


def token_by_token(layer: MoE, x: torch.Tensor, *, topk: int, gated: bool) -> torch.Tensor:
    """The weighted sum of each token's experts, one token after the other."""
    rows = []
    for token in x.flatten(0, 1):
        probabilities = (layer.router.weight @ token).softmax(0)
        best = probabilities.argsort(descending=True)[:topk].tolist()
        total = sum(probabilities[e] for e in best) if topk > 1 else 1.0
        experts = layer.experts.local_experts
        rows.append(
            sum(probabilities[e] / total * mlp(token, experts[str(e)], gated=gated) for e in best)
        )
    return torch.stack(rows).view_as(x)


def test_two_normalised_gated_experts_of_each_token_are_summed() -> None:
    layer, x = build(MIXTRAL), states()

    torch.testing.assert_close(layer(x)[0], token_by_token(layer, x, topk=2, gated=True))


def test_an_mlp_for_all_tokens_is_added() -> None:
    layer, x = build(SHARED), states()

    expected = token_by_token(layer, x, topk=3, gated=False)
    expected += mlp(x, layer.shared_experts, gated=False)
    torch.testing.assert_close(layer(x)[0], expected)


def test_a_residual_mlp_is_mixed_in_by_a_learned_share() -> None:
    layer, x = build(PR_MOE), states()

    shares = F.linear(x, layer.coefficient.weight, layer.coefficient.bias).softmax(-1)
    expected = shares[..., :1] * token_by_token(layer, x, topk=1, gated=False)
    expected += shares[..., 1:] * mlp(x, layer.shared_experts, gated=False)
    torch.testing.assert_close(layer(x)[0], expected)


def test_a_capacity_that_holds_all_tokens_changes_nothing() -> None:
    wide = replace(MIXTRAL, moe_capacity_factor=4.0)
    x = states()

    torch.testing.assert_close(build(wide)(x)[0], build(MIXTRAL)(x)[0])


def test_a_token_without_a_place_gets_nothing() -> None:
    tight = replace(PR_MOE, moe_residual=False, moe_capacity_factor=0.5, moe_min_capacity=1)
    layer, x = build(tight), states()

    changed = layer(x)[0].flatten(0, 1)
    zero = (changed == 0).all(-1)

    experts = (x.flatten(0, 1) @ layer.router.weight.mT).argmax(-1)
    seen = [0, 0, 0, 0]
    for token, expert in enumerate(experts.tolist()):
        seen[expert] += 1
        assert zero[token] == (seen[expert] > 6)  # 48 tokens / 4 experts * 0.5


def test_outside_training_another_capacity_holds() -> None:
    config = replace(MIXTRAL, moe_capacity_factor=0.2)
    x = states()

    assert not torch.allclose(build(config)(x)[0], build(MIXTRAL)(x)[0])
    torch.testing.assert_close(build(config).eval()(x)[0], build(MIXTRAL)(x)[0])


def test_first_choices_and_earlier_tokens_get_the_places() -> None:
    choice = Choice(torch.tensor([[0, 1], [1, 0], [0, 2], [0, 1]]), torch.rand(4, 2))

    kept = places(choice, experts=3, capacity=2, policy="position")

    # Expert 0: tokens 0 and 2 as first choices; expert 1: token 1 first, then token 0.
    assert kept.tolist() == [[True, True], [True, False], [True, True], [False, False]]


def test_the_most_probable_choices_get_the_places() -> None:
    gates = torch.tensor([[0.3], [0.9], [0.5], [0.8]])
    choice = Choice(torch.zeros(4, 1, dtype=torch.int64), gates)

    kept = places(choice, experts=2, capacity=2, policy="probability")

    assert kept.flatten().tolist() == [False, True, False, True]


def test_weights_of_what_was_kept_sum_to_one() -> None:
    gates = torch.tensor([[0.5, 0.3], [0.4, 0.2]])
    kept = torch.tensor([[True, True], [False, False]])

    weights = weights_of(gates, kept, normalize=True)

    torch.testing.assert_close(weights, torch.tensor([[0.625, 0.375], [0.0, 0.0]]))


@pytest.mark.parametrize("choices", ["all", "first"])
def test_the_loss_of_even_use_is_one_and_that_of_a_single_expert_their_number(choices) -> None:
    even, lopsided = torch.zeros(1, 4, 4), torch.zeros(1, 4, 4)
    lopsided[..., 2] = 50.0

    def cost(scores, experts):
        return balance_loss(scores.softmax(-1), experts, scope="sequence", choices=choices)

    assert cost(even, torch.arange(4).view(1, 4, 1)).item() == pytest.approx(1.0)
    assert cost(lopsided, torch.full((1, 4, 1), 2)).item() == pytest.approx(4.0)


def test_each_sequence_or_the_micro_batch_is_balanced() -> None:
    probabilities, choice = choose(torch.randn(3, 8, 4, dtype=torch.float64) * 3, topk=2)
    options = {"choices": "all"}

    each = balance_loss(probabilities, choice.experts, scope="sequence", **options)
    together = balance_loss(probabilities, choice.experts, scope="micro_batch", **options)

    for row in range(3):
        alone = balance_loss(
            probabilities[row : row + 1], choice.experts[row : row + 1], scope="sequence", **options
        )
        torch.testing.assert_close(each[row : row + 1], alone)
    means = probabilities.flatten(0, 1).mean(0)
    shares = torch.bincount(choice.experts.flatten(), minlength=4) / 48
    torch.testing.assert_close(together, (4 * (means * shares).sum()).expand(3))


def test_the_z_loss_is_the_mean_square_of_the_log_normaliser() -> None:
    scores = torch.randn(2, 5, 3)

    expected = [scores[i].exp().sum(-1).log().square().mean() for i in range(2)]
    torch.testing.assert_close(z_loss(scores), torch.stack(expected))


def test_the_loss_contains_the_routing_in_training_only() -> None:
    model = GPT(MIXTRAL, SINGLE, dtype=torch.float64)
    tokens = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(0))
    mask = torch.rand(2, 16, dtype=torch.float64)

    loss = model(tokens, tokens, loss_mask=mask)
    evaluated = model.eval()(tokens, tokens, loss_mask=mask)

    assert isinstance(loss, RoutedLoss)
    assert loss.routing_sum > 0.1 * mask.sum()  # two layers, each at least about 1 * 0.1
    torch.testing.assert_close(loss.loss_sum - loss.routing_sum, (loss.losses * mask).sum())
    torch.testing.assert_close(evaluated.loss_sum, (loss.losses * mask).sum())
    loss_sum, losses = loss
    assert loss_sum is loss.loss_sum
    assert losses is loss.losses


def test_every_parameter_gets_a_gradient_also_where_no_token_came() -> None:
    model = GPT(replace(MIXTRAL, num_experts=16, moe_topk=1), SINGLE)
    tokens = torch.randint(0, 97, (1, 4), generator=torch.Generator().manual_seed(0))

    model(tokens, tokens).loss_sum.backward()

    assert all(parameter.grad is not None for parameter in model.parameters())
    assert any(not parameter.grad.any() for parameter in model.parameters())


def test_a_side_loss_joins_the_gradient() -> None:
    hidden = torch.ones(3, requires_grad=True)

    (with_loss(hidden * 2, (hidden * 5).sum()) * 7).sum().backward()

    assert hidden.grad.tolist() == [19.0] * 3


@pytest.mark.parametrize("config", [MIXTRAL, PR_MOE, SHARED, replace(SHARED, add_bias=False)])
def test_the_parameter_count_is_that_of_the_built_model(config) -> None:
    shards = GPT(config, SINGLE, device="meta").parameter_shards().values()

    assert config.num_params() == sum(torch.Size(shard.global_shape).numel() for shard in shards)


def test_a_token_pays_for_the_experts_that_it_uses() -> None:
    dense = replace(GPT2, ffn_hidden_size=64)
    sparse = replace(dense, num_experts=8, moe_topk=2)

    more = sparse.flops_per_token(16) - dense.flops_per_token(16)

    assert more == 6 * 2 * (8 * 32 + 2 * 32 * 64)  # layers * (router + one more expert)


def test_mixtral_has_its_published_sizes() -> None:
    config = GPTConfig(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        ffn_hidden_size=14336,
        vocab_size=32000,
        max_position_embeddings=32768,
        position_embedding="rope",
        activation="swiglu",
        normalization="rmsnorm",
        add_bias=False,
        tie_embeddings=False,
        num_experts=8,
        moe_topk=2,
    )

    assert config.num_params() == 46_702_792_704
    active = config.flops_per_token(1) / 6 - 32 * 2 * 4096  # without attention's one pair
    assert round(active / 1e9, 1) == 12.7  # "12.9B" with the table of token vectors


def test_layers_have_experts_as_told() -> None:
    assert replace(SHARED, num_layers=5).experts == (0, 4, 0, 4, 0)
    assert replace(GPT2, layer_experts=(1, 4)).experts == (0, 4)
    assert GPT2.experts == (0, 0)


def test_a_record_of_experts_is_read_back() -> None:
    record = PR_MOE.record() | {"layer_experts": list(PR_MOE.layer_experts)}

    assert GPTConfig.from_record(record) == PR_MOE.resolved()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 4, "moe_topk": 5}, r"moe_topk \(5\) is more than the 4 experts"),
        ({"layer_experts": (4,)}, r"layer_experts has 1 entries for num_layers \(2\)"),
        ({"layer_experts": (4, -1)}, r"layer_experts \(4, -1\) must not be negative"),
        ({"layer_experts": (0, 4), "num_experts": 4}, "leave one of the two out"),
        ({"num_experts": 4, "expert_interval": 3}, r"expert_interval \(3\) is larger than"),
        ({"moe_residual": True, "moe_shared_hidden_size": 8}, "choose one of the two"),
        ({"moe_loss_coeff": -1.0}, r"moe_loss_coeff \(-1.0\) must not be negative"),
        ({"moe_capacity_factor": 0.0}, r"moe_capacity_factor \(0.0\) must be above 0"),
        ({"moe_drop_policy": "luck"}, r"moe_drop_policy \('luck'\) is unknown"),
    ],
)
def test_experts_that_do_not_fit_are_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        replace(GPT2, **changes)


@pytest.mark.parametrize(
    ("config", "sizes", "message"),
    [
        (GPT2, {"dp_size": 2, "ep_size": 2}, "ep_size is 2, but the model has no experts"),
        (MIXTRAL, {"dp_size": 3, "ep_size": 3}, r"layer 0 has 4 experts, not a multiple of ep_"),
        (
            replace(MIXTRAL, moe_ffn_hidden_size=7),
            {"tp_size": 2},
            r"width of the experts \(7\) is not a multiple of tp_size \(2\)",
        ),
    ],
)
def test_a_layout_that_does_not_divide_the_experts_is_refused(config, sizes, message) -> None:
    with pytest.raises(ValueError, match=message):
        GPT(config, ProcessGroups(layout=Layout(**sizes), rank=0))


def test_whole_experts_may_have_any_width() -> None:
    config = replace(MIXTRAL, moe_ffn_hidden_size=7)

    config.check_expert_parallel(2, tp_size=1)
    assert Execution(expert_tensor_parallel=False)
