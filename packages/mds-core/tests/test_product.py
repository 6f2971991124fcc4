"""A product that keeps little and one whose weight gradient waits are exact all the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mds_core.layers.product import product
from mds_kernels.testing import relative_error


def operands(dtype=torch.float64) -> tuple[torch.Tensor, nn.Parameter, nn.Parameter]:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, dtype=dtype, requires_grad=True)
    return x, *(nn.Parameter(torch.randn(*shape, dtype=dtype)) for shape in ((5, 6), (5,)))


def test_a_waiting_gradient_is_that_of_the_plain_product() -> None:
    x, weight, bias = operands()
    F.linear(x, weight, bias).square().sum().backward()
    expected = [tensor.grad for tensor in (x, weight, bias)]
    x.grad = weight.grad = bias.grad = None
    waiting = []

    product(x, weight, bias, later=waiting.append).square().sum().backward()
    before = weight.grad, bias.grad
    for closure in waiting:
        closure()

    assert before == (None, None)
    for tensor, want in zip((x, weight, bias), expected, strict=True):
        assert relative_error(tensor.grad, want) < 1e-15


def test_a_frozen_weight_gets_no_gradient() -> None:
    x, weight, bias = operands()
    weight.requires_grad_(False)
    waiting = []

    product(x, weight, bias, later=waiting.append).sum().backward()
    for closure in waiting:
        closure()

    assert weight.grad is None
    assert torch.equal(bias.grad, torch.full((5,), 8.0, dtype=torch.float64))


def test_under_autocast_the_rounded_input_is_kept() -> None:
    x, weight, _ = operands(torch.float32)
    kept = []

    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        y = product(x, weight, later=lambda closure: closure())
    y.sum().backward()

    assert y.dtype == torch.bfloat16
    assert [tensor.dtype for tensor in kept] == [torch.bfloat16]
    assert x.grad.dtype == weight.grad.dtype == torch.float32


def test_sequence_parallelism_shares_out_all_that_a_layer_keeps(two_ranks) -> None:
    for rank in two_ranks:
        kept = rank["kept"]
        assert kept["sequence-parallel"] == kept["whole"] / 2
        assert kept["sequence-parallel"] < kept["tensor-parallel"] < kept["whole"]


@pytest.mark.parametrize(
    ("kind", "counts"),
    [("now", [1, 2, 2]), ("later", [1, 1, 2]), ("again", [1, 2, 2])],
)
def test_positions_are_gathered_once_more_for_the_weight_gradient(kind, counts, two_ranks) -> None:
    """After the forward pass, the backward pass and what waited; recomputation adds nothing."""
    for rank in two_ranks:
        assert rank["gathered"][kind]["counts"] == counts
        assert rank["gathered"][kind]["error"] < 1e-13
