"""Every Triton kernel against float64, forward and backward, in Triton's interpreter."""

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="triton is not installed: nox -s triton has it")

import mds_kernels
from mds_kernels import cross_entropy, linear_cross_entropy, rope, why
from mds_kernels.backends.triton import launch
from mds_kernels.check import measure
from mds_kernels.check_cases import CASES
from mds_kernels.registry import OPS
from mds_kernels.testing import TOLERANCES, relative_error, run_ranks

WITH_TRITON = [op for op in OPS if any(one.backend == "triton" for one in OPS[op])]
COVERED = [check for check in CASES if check.op in WITH_TRITON]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("check", COVERED, ids=[f"{one.op}: {one.case}" for one in COVERED])
def test_results_and_gradients_are_as_near_to_float64_as_plain_torch(check, dtype):
    measurement = measure(check, dtype=dtype, backend="triton")

    assert measurement.passed, measurement


def test_the_issue_of_the_package_has_its_kernels():
    assert set(WITH_TRITON) == {
        "linear_cross_entropy",
        "cross_entropy",
        "add_layer_norm",
        "add_rms_norm",
        "swiglu",
        "geglu",
        "rope",
        "scaled_masked_softmax",
        "moe_permute",
        "moe_unpermute",
    }


# ---- longer than a block -----------------------------------------------------------------------


def test_a_vocabulary_of_several_blocks():
    logits = torch.randn(3, 9001, requires_grad=True)
    labels = torch.tensor([0, 9000, 4096])

    losses = cross_entropy(logits, labels, label_smoothing=0.1, backend="triton")
    (gradient,) = torch.autograd.grad(losses.sum(), logits)

    exact = logits.detach().double().requires_grad_()
    plain = torch.nn.functional.cross_entropy(exact, labels, label_smoothing=0.1, reduction="none")
    assert relative_error(losses, plain) <= 1e-6
    assert relative_error(gradient, torch.autograd.grad(plain.sum(), exact)[0]) <= 1e-6


@pytest.mark.parametrize("causal", [False, True])
def test_scores_of_several_blocks(causal):
    scores = torch.randn(1, 1, 2, 4500, requires_grad=True)

    ours = mds_kernels.scaled_masked_softmax(scores, causal=causal, backend="triton")
    plain = mds_kernels.scaled_masked_softmax(scores, causal=causal, backend="torch")

    assert relative_error(ours, plain) <= 1e-6
    cotangent = torch.randn(ours.shape)
    gradients = [torch.autograd.grad(one, scores, cotangent)[0] for one in (ours, plain)]
    assert relative_error(*gradients) <= 1e-6


def test_a_gate_of_several_blocks():
    x = torch.randn(2, 2 * 1500)

    ours = mds_kernels.swiglu(x, backend="triton")

    assert relative_error(ours, mds_kernels.swiglu(x, backend="torch")) <= 1e-6


def test_more_heads_than_a_program_turns_at_a_time_packed_and_strided():
    query, key = torch.randn(6, 7, 8)[::2], torch.randn(3, 5, 16)[..., ::2]
    angles = torch.rand(3, 1, 4)

    ours = rope(query, key, angles.cos(), angles.sin(), backend="triton")
    plain = rope(query, key, angles.cos(), angles.sin(), backend="torch")

    for one, other in zip(ours, plain, strict=True):
        assert relative_error(one, other) <= 1e-6


def test_angles_that_differ_by_head_are_turned_by_torch():
    query, key = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    angles = torch.rand(3, 2, 2)

    ours = rope(query, key, angles.cos(), angles.sin(), backend="triton")

    assert torch.equal(ours[0], rope(query, key, angles.cos(), angles.sin(), backend="torch")[0])


def test_rows_too_long_for_a_program_are_normed_by_torch(monkeypatch):
    monkeypatch.setattr("mds_kernels.backends.triton.norm.LONGEST_ROW", 7)
    x, weight = torch.randn(2, 8), torch.randn(8)

    for op in (mds_kernels.add_rms_norm, mds_kernels.add_layer_norm):
        ours = op(x, x, weight, backend="triton")
        assert torch.equal(ours[0], op(x, x, weight, backend="torch")[0])


def test_more_rows_than_programs_share_the_weights_gradient():
    rows = 4 * launch._CPU_PROGRAMS + 1
    x, residual = torch.randn(rows, 5), torch.randn(rows, 5)
    weight = torch.randn(5, requires_grad=True)

    gradients = [
        torch.autograd.grad(
            mds_kernels.add_rms_norm(x, residual, weight, backend=one)[0].sum(), weight
        )
        for one in ("triton", "torch")
    ]

    assert relative_error(gradients[0][0], gradients[1][0]) <= 1e-6


def test_only_one_of_two_results_gets_a_gradient():
    x = torch.randn(3, 8, requires_grad=True)
    weight = torch.randn(8, requires_grad=True)

    for number in (0, 1):
        ours, plain = (
            torch.autograd.grad(
                mds_kernels.add_rms_norm(x, x.detach(), weight, backend=one)[number].sum(), x
            )[0]
            for one in ("triton", "torch")
        )
        assert relative_error(ours, plain) <= 1e-6


# ---- more than 2^31 elements -------------------------------------------------------------------


def far_apart(rows, columns, dtype):
    """Return [rows, columns], the last row 2^31 elements behind; the pages between are empty."""
    stride = -(-(2**31) // (rows - 1))
    return torch.empty((rows - 1) * stride + columns, dtype=dtype).as_strided(
        (rows, columns), (stride, 1)
    )


def test_logits_of_more_than_two_billion_elements():
    logits = far_apart(3, 11, torch.bfloat16)
    logits.copy_(torch.randn(3, 11))
    labels = torch.tensor([1, 2, 3])

    losses = cross_entropy(logits, labels, backend="triton")

    assert relative_error(losses, cross_entropy(logits.clone(), labels, backend="torch")) <= 1e-6


# ---- ranks -------------------------------------------------------------------------------------


def make(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(13, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(50, 16, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 43, (13,), generator=generator)
    labels[::5] = -100
    return hidden, weight, labels


OBJECTIVE = {"vocab_size": 43, "label_smoothing": 0.1, "z_loss": 1e-3, "backend": "triton"}


def on_this_rank(rows_of_rank, recompute):
    rank, group = dist.get_rank(), dist.group.WORLD
    hidden, whole, labels = make(torch.float32)
    start = sum(rows_of_rank[:rank])
    weight = whole.detach()[start : start + rows_of_rank[rank]].clone().requires_grad_()
    place = {**OBJECTIVE, "vocab_start": start, "group": group, "chunk_size": 5}
    loss, losses = linear_cross_entropy(hidden, weight, labels, recompute=recompute, **place)
    grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight))
    dist.all_reduce(grad_hidden)
    given = cross_entropy((hidden @ weight.T).detach(), labels, **place)
    return losses, grad_hidden, grad_weight, given


def in_every_setting():
    return [
        on_this_rank(rows, recompute)
        for rows in ([25, 25], [48, 2])  # equal; the second rank holds padding only
        for recompute in (False, True)
    ]


def test_two_ranks_equal_one_process():
    hidden, weight, labels = make(torch.float32)
    loss, losses = linear_cross_entropy(hidden, weight, labels, **OBJECTIVE)
    grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight))

    for first, second in zip(*run_ranks(in_every_setting, 2), strict=True):
        for own in (first, second):
            assert relative_error(own[0], losses) <= 1e-6
            assert relative_error(own[1], grad_hidden) <= 1e-6
            assert relative_error(own[3], losses) <= 1e-6
        assert relative_error(torch.cat([first[2], second[2]]), grad_weight) <= 1e-6


# ---- other ways to call them -------------------------------------------------------------------


FIRST = {check.op: check for check in reversed(COVERED)}


@pytest.mark.parametrize("op", WITH_TRITON)
def test_asked_for_explicitly_it_stays_whole_in_a_compiled_graph(op):
    check = FIRST[op]
    inputs = check.inputs(torch.Generator().manual_seed(0))
    inputs = {
        name: x.detach().float().requires_grad_(x.requires_grad)
        if x is not None and x.is_floating_point()
        else x
        for name, x in inputs.items()
    }
    leaves = [x for x in inputs.values() if x is not None and x.requires_grad]
    options = {**check.arguments, **check.options, "backend": "triton"}

    def call(**inputs):
        result = check.run(**inputs, **options)
        results = (result,) if isinstance(result, torch.Tensor) else result
        return sum(one.square().sum() for one in results if one.is_floating_point())

    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    ours = torch.autograd.grad(compiled(**inputs), leaves)

    for one, other in zip(ours, torch.autograd.grad(call(**inputs), leaves), strict=True):
        assert relative_error(one, other) <= 1e-6


def test_the_graph_ops_pass_torchs_own_check():
    x, weight, rstd = torch.randn(3, 8), torch.randn(8), torch.rand(3)
    scores = torch.randn(1, 2, 3, 4)
    angles = torch.rand(3, 1, 1, 4)
    heads = torch.randn(3, 1, 2, 8)
    why("swiglu", backend="triton")
    for op in WITH_TRITON:  # registers the graph ops
        mds_kernels.dispatch.implementation(op, device="cpu", dtype=torch.float32, backend="triton")
    ops = torch.ops.mds_kernels
    calls = [
        (ops.triton_norm_forward, (x, x, weight, weight, 1e-5, True)),
        (ops.triton_norm_forward, (x, x, weight, None, 1e-5, False)),
        (ops.triton_norm_backward, (x, x, x, weight, rstd, rstd, True, True)),
        (ops.triton_norm_backward, (x, None, x, weight, rstd[:0], rstd, False, False)),
        (ops.triton_gate_forward, (x, weight, "silu")),
        (ops.triton_gate_backward, (x[:, :4], x, None, "tanh")),
        (ops.triton_rope, (heads, heads, angles, angles, False, True)),
        (ops.triton_softmax_forward, (scores, None, 0.5, True)),
        (ops.triton_softmax_backward, (scores, scores, 0.5)),
    ]

    for op, arguments in calls:
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_auto_never_takes_the_interpreter_and_says_so():
    choice = why("swiglu")

    assert choice.backend == "torch"
    assert dict(choice.others)["triton"] == "usable, on request only"


def test_float64_is_left_to_torch():
    choice = why("rope", dtype=torch.float64)

    assert dict(choice.others)["triton"] == "it does not take float64"
    assert TOLERANCES["kernel_ratio"] == 1.5
