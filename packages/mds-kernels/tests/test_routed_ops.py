"""Experts, main gradients, attention and the optimizer beyond being near to float64."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from mds_kernels import (
    adamw,
    attention,
    moe_permute,
    moe_unpermute,
    wgrad_accumulate,
    why,
)
from mds_kernels.backends.flash import attention as flash
from mds_kernels.testing import relative_error


def test_rows_are_counted_and_keep_the_order_of_the_tokens():
    x = torch.arange(4.0)[:, None]
    experts = torch.tensor([[2, 0], [0, 2], [2, 0], [0, 2]])

    permuted = moe_permute(x, experts, num_experts=4)

    assert permuted.tokens_per_expert.tolist() == [4, 0, 4, 0]
    assert permuted.tokens.flatten().tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert torch.equal(permuted.tokens[permuted.positions[:, 0]], x)


def test_experts_by_hand_give_what_a_dense_mixture_gives():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(11, 6, generator=generator, dtype=torch.float64)
    weights = torch.randn(3, 6, 6, generator=generator, dtype=torch.float64)
    probabilities, experts = torch.rand(11, 3, generator=generator).double().topk(2)

    permuted = moe_permute(x, experts, num_experts=3)
    parts = permuted.tokens.split(permuted.tokens_per_expert.tolist())
    rows = torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])
    mixed = moe_unpermute(rows, permuted.positions, probabilities)

    dense = torch.einsum("nh,eho->neo", x, weights)
    picked = dense.gather(1, experts[..., None].expand(-1, -1, 6))
    assert relative_error(mixed, (picked * probabilities[..., None]).sum(dim=1)) <= 1e-14


def test_without_probabilities_the_rows_are_not_kept():
    rows = torch.randn(6, 4, requires_grad=True)
    positions = torch.randperm(6).view(3, 2)
    kept = []

    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape), lambda x: x):
        moe_unpermute(rows, positions)

    assert kept == [(3, 2)]


def test_the_graph_ops_of_permutation_pass_torchs_own_check():
    ops = torch.ops.mds_kernels
    x, rows = torch.randn(5, 4), torch.randn(10, 4)
    order = torch.randperm(10)
    positions, probabilities = order.view(5, 2), torch.rand(5, 2)
    moe_unpermute(rows, positions)  # registers them

    def check(op, arguments):
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))

    check(ops.torch_spread, (x, order, 2, None))
    check(ops.torch_spread, (x, order, 2, probabilities))
    check(ops.torch_gather, (rows, positions, probabilities))
    check(ops.torch_dot, (x, rows, positions))


def test_a_main_gradient_sums_many_small_parts_that_16_bits_would_lose():
    total = torch.full((1, 1), 256.0)
    small = torch.ones(1, 1, dtype=torch.bfloat16)

    for _ in range(4):
        wgrad_accumulate(total, small, small)

    assert total.item() == 260  # in bf16, 256 + 1 is 256


def test_a_main_gradient_has_no_graph():
    total = torch.zeros(3, 2, requires_grad=True)

    wgrad_accumulate(total, torch.ones(4, 3), torch.ones(4, 2, requires_grad=True))

    assert total.grad_fn is None
    assert torch.equal(total.detach(), torch.full((3, 2), 4.0))


def test_attention_of_a_blind_query_is_zero_with_finite_gradients():
    query, key, value = (torch.randn(1, 1, 3, 4, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[False, True, True], [True, True, True], [False, False, False]])

    result = attention(query, key, value, mask)
    gradients = torch.autograd.grad(result.square().sum(), (query, key, value))

    assert torch.equal(result[0, 0, 1], torch.zeros(4))
    assert torch.equal(gradients[0][0, 0, 1], torch.zeros(4))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_flash_attn_is_called_in_its_own_layout(monkeypatch):
    def flash_attn_func(q, k, v, *, causal, softmax_scale):
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        result = F.scaled_dot_product_attention(*heads_first, is_causal=causal, scale=softmax_scale)
        return result.transpose(1, 2)

    stand_in = types.SimpleNamespace(flash_attn_func=flash_attn_func)
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    q, k, v = (torch.randn(2, 3, 5, 8) for _ in range(3))

    ours = flash.attention(q, k, v, None, causal=True, scale=0.3)

    assert relative_error(ours, attention(q, k, v, causal=True, scale=0.3)) <= 1e-6
    with pytest.raises(ValueError, match="takes no mask but the causal one"):
        flash.attention(q, k, v, torch.ones(5, 5, dtype=torch.bool), causal=False, scale=1.0)


def test_flash_attn_that_is_not_there_is_the_reason():
    choice = why("attention", device="cuda", dtype=torch.bfloat16)

    assert choice.backend == "torch"
    assert choice.others == (("flash", "no flash-attn is installed"),)


def test_the_optimizer_is_fused_on_a_cpu_and_its_state_is_torchs():
    leaf = torch.ones(3, requires_grad=True)
    optimizer = adamw([leaf], lr=0.1)

    leaf.sum().backward()
    optimizer.step()

    assert optimizer.defaults["fused"] is True
    assert set(optimizer.state[leaf]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: moe_permute(torch.ones(2, 3), torch.ones(2), num_experts=1), r"experts \[n, k\]"),
        (
            lambda: moe_permute(torch.ones(2, 3), torch.ones(2, 1), num_experts=1),
            "experts are torch.float32",
        ),
        (
            lambda: moe_permute(torch.ones(1, 3), torch.tensor([[4]]), num_experts=4),
            "the number 4; there are 4 experts",
        ),
        (lambda: moe_unpermute(torch.ones(3, 2), torch.zeros(2, 2).long()), "positions"),
        (
            lambda: moe_unpermute(torch.ones(4, 2), torch.zeros(2, 2).long(), torch.ones(2)),
            r"probabilities must be \[n, k\]",
        ),
        (lambda: wgrad_accumulate(*[torch.ones(2, 3)] * 3), r"total \[o, i\]"),
        (
            lambda: wgrad_accumulate(torch.ones(2, 2).bfloat16(), *[torch.ones(2, 2)] * 2),
            "total is torch.bfloat16",
        ),
        (lambda: attention(*[torch.ones(2, 3, 4)] * 3), "n a multiple of n_kv"),
        (lambda: attention(*[torch.ones(1, 1, 2, 4)] * 3, torch.ones(2, 2)), "mask must be bool"),
        (lambda: adamw([], lr=0.1), "no parameters"),
    ],
)
def test_arguments_that_do_not_fit_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
