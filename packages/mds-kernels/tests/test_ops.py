"""What the ops without a vocabulary promise beyond being near to float64."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import mds_kernels
from mds_kernels import (
    bias_dropout_add,
    geglu,
    layer_norm,
    rope,
    scaled_masked_softmax,
    swiglu,
)
from mds_kernels.check_cases import CASES
from mds_kernels.registry import OPS
from mds_kernels.testing import relative_error

IN_PLACE = ("wgrad_accumulate", "adamw")
DIFFERENTIABLE = [op for op in OPS if not op.endswith("cross_entropy") and op not in IN_PLACE]
FIRST = {check.op: check for check in reversed(CASES)}


def inputs_of(op):
    check = FIRST[op]
    inputs = check.inputs(torch.Generator().manual_seed(0))
    return check, inputs, [x for x in inputs.values() if x is not None and x.requires_grad]


def gradients_of(function, inputs, leaves):
    result = function(**inputs)
    results = (result,) if isinstance(result, torch.Tensor) else result
    return torch.autograd.grad(sum(one.square().sum() for one in results), leaves)


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_it_compiles_into_one_graph_with_the_same_gradients(op):
    check, inputs, leaves = inputs_of(op)

    def call(**inputs):
        return check.run(**inputs, **check.arguments)

    torch.compiler.reset()  # each op is a recompilation of the same few lines
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)

    ours = gradients_of(compiled, inputs, leaves)
    eager = gradients_of(call, inputs, leaves)
    for one, other in zip(ours, eager, strict=True):
        assert relative_error(one, other) <= 1e-13


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_activation_checkpointing_gives_the_same_gradients(op):
    check, inputs, leaves = inputs_of(op)

    def call(**inputs):
        return check.run(**inputs, **check.arguments)

    def again(**inputs):
        return checkpoint(call, use_reentrant=False, **inputs)

    for one, other in zip(
        gradients_of(again, inputs, leaves), gradients_of(call, inputs, leaves), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_under_autocast_results_are_near_and_gradients_keep_their_dtype(op):
    check, inputs, leaves = inputs_of(op)
    single = {name: narrowed(x) for name, x in inputs.items()}
    leaves = [x for x in single.values() if x is not None and x.requires_grad]

    def call(**inputs):
        return check.run(**inputs, **check.arguments)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = gradients_of(call, single, leaves)

    for one, other in zip(ours, gradients_of(call, single, leaves), strict=True):
        assert one.dtype == torch.float32
        assert relative_error(one, other) <= 0.05


def narrowed(x):
    if x is None or not x.is_floating_point():
        return x
    return x.detach().float().requires_grad_(x.requires_grad)


def saved_bytes(function, *inputs):
    """Return what the backward pass keeps beside the inputs themselves, by storage."""
    known = {x.untyped_storage().data_ptr() for x in inputs}
    saved = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function(*inputs)
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize(("ours", "plain"), [(swiglu, F.silu), (geglu, F.gelu)])
def test_a_gate_keeps_nothing_but_its_inputs(ours, plain):
    x = torch.randn(4, 64, requires_grad=True)
    bias = torch.randn(64, requires_grad=True)

    def naive(x, bias):
        gate, up = (x + bias).chunk(2, dim=-1)
        return plain(gate) * up

    assert saved_bytes(ours, x, bias) == 0
    assert saved_bytes(naive, x, bias) >= 4 * 64 * 4 + 4 * 32 * 4


def test_rope_keeps_nothing_but_the_angles():
    query = torch.randn(5, 2, 3, 8, dtype=torch.bfloat16, requires_grad=True)
    key = torch.randn(5, 2, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.rand(5, 1, 1, 4)

    assert saved_bytes(rope, query, key, angles.cos(), angles.sin()) == 0


def test_softmax_keeps_only_its_result_in_the_dtype_of_the_scores():
    scores = torch.randn(2, 3, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.rand(2, 1, 8, 8) < 0.3

    assert saved_bytes(scaled_masked_softmax, scores, mask) == scores.numel() * 2


def test_rope_halves_are_those_of_transformers():
    """The rotate_half formula of GPT-NeoX and Llama."""
    query = torch.randn(5, 2, 3, 8)
    key = torch.randn(5, 2, 3, 8)
    angles = torch.rand(5, 1, 1, 4)

    ours, _ = rope(query, key, angles.cos(), angles.sin())

    cos, sin = (torch.cat([x, x], dim=-1) for x in (angles.cos(), angles.sin()))
    half = torch.cat([-query[..., 4:], query[..., :4]], dim=-1)
    assert relative_error(ours, query * cos + half * sin) <= 1e-6


def test_softmax_of_a_query_that_sees_nothing_is_zero_with_zero_gradient():
    scores = torch.randn(1, 1, 2, 3, requires_grad=True)
    mask = torch.tensor([[False, False, True], [True, True, True]])

    result = scaled_masked_softmax(scores, mask)
    (gradient,) = torch.autograd.grad(result[..., 0].sum(), scores)

    assert torch.equal(result[0, 0, 1], torch.zeros(3))
    assert torch.equal(gradient[0, 0, 1], torch.zeros(3))
    assert gradient.isfinite().all()


def test_causal_softmax_has_no_limit_of_length():
    """The fused kernels this replaces stop at 4096 or 16384 keys."""
    scores = torch.zeros(1, 1, 2, 20_001)

    result = scaled_masked_softmax(scores, causal=True)

    assert result[0, 0, 0, -1] == 0
    assert result[0, 0, 1, -1] == pytest.approx(1 / 20_001)


def test_dropout_without_a_mask_draws_from_torch():
    x, residual = torch.ones(1000), torch.zeros(1000)
    torch.manual_seed(1)

    result = bias_dropout_add(x, None, residual, probability=0.25)

    assert result.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert 0.7 < (result > 0).float().mean() < 0.8


def test_nothing_is_dropped_without_training():
    x, residual = torch.ones(4), torch.ones(4)

    result = bias_dropout_add(x, None, residual, probability=0.9, training=False)

    assert torch.equal(result, torch.full((4,), 2.0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: swiglu(torch.ones(2, 3)), "last dimension is odd"),
        (lambda: geglu(torch.ones(2, 4), torch.ones(2)), r"bias must be \[2 f\]"),
        (lambda: layer_norm(torch.ones(2, 4), torch.ones(2)), r"weight must be \[h\]"),
        (lambda: scaled_masked_softmax(torch.ones(1, 1, 2, 2), torch.ones(2, 2)), "boolean"),
        (lambda: bias_dropout_add(*[torch.ones(2)] * 3, probability=1.0), "probability"),
        (lambda: rope(*[torch.ones(2, 4)] * 2, *[torch.ones(2, 3)] * 2), "rotates 6 channels"),
    ],
)
def test_arguments_that_do_not_fit_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_layer_norm_gives_the_numbers_of_the_case(cases_folder):
    case = json.loads((cases_folder / "D01" / "expected.json").read_text())
    x, weight, bias = (torch.tensor(case[name]) for name in ("x", "weight", "bias"))

    result = mds_kernels.layer_norm(x, weight, bias, eps=case["eps"])

    assert torch.allclose(result, torch.tensor(case["y"]), rtol=0, atol=case["tolerance"])
