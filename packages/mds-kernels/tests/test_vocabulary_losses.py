"""linear_cross_entropy and cross_entropy beyond one process's numbers: ranks, padding, autograd."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from mds_kernels import cross_entropy, linear_cross_entropy
from mds_kernels.backends.torch import linear_cross_entropy as backend
from mds_kernels.backends.torch import vocabulary_softmax
from mds_kernels.ops.linear_cross_entropy import linear_cross_entropy_reference
from mds_kernels.testing import TOLERANCES, relative_error, run_ranks

VOCABULARY = 43
OBJECTIVE = {"vocab_size": VOCABULARY, "label_smoothing": 0.1, "z_loss": 1e-3}


def make(dtype=torch.float64, *, rows=50, tokens=37):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 16, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(rows, 16, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    labels[::5] = -100
    loss_weights = torch.rand(tokens, generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), labels, loss_weights


def gradients(loss, *leaves):
    return torch.autograd.grad(loss, leaves)


# ---- ranks -------------------------------------------------------------------------------------


def on_this_rank(rows_of_rank, dtype, recompute):
    """Return loss, losses, whole gradient of hidden, this rank's gradient of weight; both ops."""
    rank, group = dist.get_rank(), dist.group.WORLD
    hidden, whole, labels, loss_weights = make(dtype)
    start = sum(rows_of_rank[:rank])
    weight = whole.detach()[start : start + rows_of_rank[rank]].clone().requires_grad_()
    place = {**OBJECTIVE, "vocab_start": start, "group": group, "chunk_size": 10}
    loss, losses = linear_cross_entropy(
        hidden, weight, labels, loss_weights=loss_weights, recompute=recompute, **place
    )
    grad_hidden, grad_weight = gradients(loss, hidden, weight)
    dist.all_reduce(grad_hidden)
    logits = (hidden @ weight.T).detach().requires_grad_()
    given = cross_entropy(logits, labels, **place)
    (grad_logits,) = gradients((given * loss_weights).sum(), logits)
    return loss.detach(), losses, grad_hidden, grad_weight, given.detach(), grad_logits


LAYOUTS = [[25, 25], [7, 43], [48, 2]]  # equal; uneven; the second rank holds padding only
SETTINGS = [
    (rows, dtype, recompute)
    for rows in LAYOUTS
    for dtype in (torch.float64, torch.float32)
    for recompute in (False, True)
]


def in_every_setting():
    return [on_this_rank(*setting) for setting in SETTINGS]


@pytest.fixture(scope="module")
def both_ranks():
    """What each of two ranks computed in each setting; started once, as ranks start slowly."""
    return dict(
        zip(SETTINGS_BY_NAME, zip(*run_ranks(in_every_setting, 2), strict=True), strict=True)
    )


SETTINGS_BY_NAME = [
    f"{rows[0]}+{rows[1]} rows, {str(dtype)[6:]}, {'recompute' if recompute else 'forward'}"
    for rows, dtype, recompute in SETTINGS
]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, setting[1]) for name, setting in zip(SETTINGS_BY_NAME, SETTINGS, strict=True)],
    ids=SETTINGS_BY_NAME,
)
def test_two_ranks_equal_one_process(both_ranks, name, dtype):
    hidden, weight, labels, loss_weights = make(dtype)
    loss, losses = linear_cross_entropy(
        hidden, weight, labels, loss_weights=loss_weights, **OBJECTIVE
    )
    grad_hidden, grad_weight = gradients(loss, hidden, weight)
    logits = (hidden @ weight.T).detach().requires_grad_()
    given = cross_entropy(logits, labels, **OBJECTIVE)
    (grad_logits,) = gradients((given * loss_weights).sum(), logits)
    tolerance = {torch.float64: TOLERANCES["layout_float64"], torch.float32: 1e-6}[dtype]

    first, second = both_ranks[name]

    for whole in (first, second):
        assert relative_error(whole[0], loss) <= tolerance
        assert relative_error(whole[1], losses) <= tolerance
        assert relative_error(whole[2], grad_hidden) <= tolerance
        assert relative_error(whole[4], given) <= tolerance
    assert relative_error(torch.cat([first[3], second[3]]), grad_weight) <= tolerance
    assert relative_error(torch.cat([first[5], second[5]], dim=1), grad_logits) <= tolerance


# ---- padding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("filler", [0.0, 1e4, torch.nan, torch.inf])
def test_padded_rows_change_nothing_whatever_they_hold(filler, recompute):
    hidden, weight, labels, loss_weights = make(rows=VOCABULARY)
    padding = torch.full((7, 16), filler, dtype=weight.dtype)
    padded = torch.cat([weight.detach(), padding]).requires_grad_()
    given = {"loss_weights": loss_weights, "recompute": recompute, **OBJECTIVE}

    plain_loss, plain_losses = linear_cross_entropy(hidden, weight, labels, **given)
    loss, losses = linear_cross_entropy(hidden, padded, labels, **given)

    assert torch.equal(loss, plain_loss)
    assert torch.equal(losses, plain_losses)
    plain_hidden, plain_weight = gradients(plain_loss, hidden, weight)
    grad_hidden, grad_weight = gradients(loss, hidden, padded)
    assert torch.equal(grad_hidden, plain_hidden)
    assert torch.equal(grad_weight[:VOCABULARY], plain_weight)
    assert torch.equal(grad_weight[VOCABULARY:], torch.zeros_like(padding))


def test_padded_columns_of_given_logits_change_nothing():
    logits = torch.randn(5, 12, dtype=torch.float64)
    logits[:, 10:] = torch.nan
    logits.requires_grad_()

    losses = cross_entropy(logits, torch.arange(5), vocab_size=10)
    (gradient,) = gradients(losses.sum(), logits)

    plain = cross_entropy(logits.detach()[:, :10], torch.arange(5))
    assert torch.equal(losses, plain)
    assert torch.equal(gradient[:, 10:], torch.zeros(5, 2, dtype=torch.float64))


def test_without_the_mask_padding_would_change_the_loss():
    """The tests above would pass for an op that never looks at padding if it did not matter."""
    hidden, weight, labels, _ = make()

    masked = linear_cross_entropy(hidden, weight, labels, vocab_size=VOCABULARY).loss_sum
    unmasked = linear_cross_entropy(hidden, weight, labels, vocab_size=50).loss_sum

    assert relative_error(unmasked, masked) > 1e-2


# ---- autograd ----------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_two_backward_passes_over_one_graph_give_the_same(recompute):
    hidden, weight, labels, _ = make()
    loss = linear_cross_entropy(hidden, weight, labels, recompute=recompute).loss_sum

    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(loss * 3, (hidden, weight))

    for one, other in zip(first, again, strict=True):
        assert relative_error(other, 3 * one) <= 1e-15


def test_one_weight_used_twice_gets_both_gradients():
    hidden, weight, labels, _ = make(rows=VOCABULARY)

    def loss(function):
        return function(hidden, weight, labels)[0] + function(2 * hidden, weight, labels)[0]

    ours = gradients(loss(linear_cross_entropy), hidden, weight)
    exact = gradients(loss(linear_cross_entropy_reference), hidden, weight)

    assert relative_error(ours[0], exact[0]) <= 1e-14
    assert relative_error(ours[1], exact[1]) <= 1e-14


def test_the_logits_may_be_used_elsewhere_too():
    logits = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    before = logits.detach().clone()

    (cross_entropy(logits, torch.arange(5)).sum() + logits.square().sum()).backward()

    assert torch.equal(logits, before)
    alone = torch.autograd.grad(cross_entropy(logits, torch.arange(5)).sum(), logits)[0]
    assert relative_error(logits.grad, alone + 2 * before) <= 1e-15


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(reentrant):
    hidden, weight, labels, _ = make()

    def head(hidden):
        return linear_cross_entropy(hidden, weight, labels).loss_sum

    plain = gradients(head(hidden), hidden)
    checkpoint(head, hidden, use_reentrant=reentrant).backward()

    assert torch.equal(hidden.grad, plain[0])


def test_a_backward_pass_split_in_two_does_each_half_alone(monkeypatch):
    hidden, weight, labels, loss_weights = make()
    given = {"loss_weights": loss_weights, "recompute": True, **OBJECTIVE}
    whole = gradients(linear_cross_entropy(hidden, weight, labels, **given)[0], hidden, weight)
    added = []
    monkeypatch.setattr(backend, "add_product", lambda *_: added.append("weight"))

    (inputs,) = gradients(linear_cross_entropy(hidden, weight.detach(), labels, **given)[0], hidden)

    assert torch.equal(inputs, whole[0])
    assert not added
    monkeypatch.undo()
    (weights,) = gradients(
        linear_cross_entropy(hidden.detach(), weight, labels, **given)[0], weight
    )
    assert torch.equal(weights, whole[1])


def test_without_gradients_no_gradient_work_is_done(monkeypatch):
    hidden, weight, labels, _ = make()
    monkeypatch.setattr(
        vocabulary_softmax, "gradient_of_logits", lambda *_, **__: pytest.fail("worked")
    )

    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels).loss_sum

    assert not loss.requires_grad
    exact = linear_cross_entropy_reference(hidden, weight, labels).loss_sum
    assert relative_error(loss, exact) <= 1e-15


def test_losses_carry_no_gradient():
    hidden, weight, labels, _ = make()

    result = linear_cross_entropy(hidden, weight, labels)

    assert result.loss_sum.requires_grad
    assert not result.losses.requires_grad


def test_float16_gradients_carry_the_loss_scale_before_they_are_rounded():
    """Otherwise every probability below 6e-8 would be lost, whatever the loss scale."""
    hidden = torch.full((1, 1), 1.0, dtype=torch.float16, requires_grad=True)
    weight = torch.tensor([[9.0], [-9.0]], dtype=torch.float16, requires_grad=True)

    (linear_cross_entropy(hidden, weight, torch.tensor([0])).loss_sum * 65536).backward()

    exact = torch.sigmoid(torch.tensor(-18.0, dtype=torch.float64)) * 65536
    assert relative_error(weight.grad[1, 0], exact) <= TOLERANCES["kernel_floor_float16"]


# ---- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_the_logits_never_exist_as_a_whole(monkeypatch, recompute):
    hidden, weight, labels, _ = make(tokens=1200)
    seen = []
    truth = vocabulary_softmax.gradient_of_logits

    def spy(exponentials, *others, **named):
        seen.append(exponentials.shape)
        return truth(exponentials, *others, **named)

    monkeypatch.setattr(vocabulary_softmax, "gradient_of_logits", spy)

    gradients(linear_cross_entropy(hidden, weight, labels, recompute=recompute)[0], hidden)

    assert seen == [(512, 50), (512, 50), (176, 50)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("recompute", [False, True])
def test_logits_worked_block_by_block_give_the_same_bits(monkeypatch, recompute, dtype):
    hidden, weight, labels, loss_weights = make(dtype)
    given = {"loss_weights": loss_weights, "recompute": recompute, **OBJECTIVE}

    def results():
        loss, losses = linear_cross_entropy(hidden, weight, labels, **given)
        logits = (hidden @ weight.T).detach().requires_grad_()
        whole = cross_entropy(logits, labels, **OBJECTIVE)
        return losses, *gradients(loss, hidden, weight), whole, *gradients(whole.sum(), logits)

    at_once = results()
    seen = []
    truth = vocabulary_softmax.gradient_of_logits

    def spy(exponentials, *others, **named):
        seen.append(len(exponentials))
        return truth(exponentials, *others, **named)

    monkeypatch.setattr(vocabulary_softmax, "gradient_of_logits", spy)
    monkeypatch.setattr(vocabulary_softmax, "_CACHED_BYTES", 7 * VOCABULARY * 8)
    in_blocks = results()

    assert max(seen) < len(hidden)
    assert sum(seen) == len(hidden)
    for one, other in zip(in_blocks, at_once, strict=True):
        assert torch.equal(one, other)


def test_the_default_chunk_follows_the_vocabulary_and_the_hidden_size():
    def chunk(hidden_size, rows, *, dtype=torch.float32, copied=False):
        hidden = torch.empty(1, hidden_size, dtype=dtype, device="meta")
        return backend._chunk(hidden, rows, copied=copied)

    assert chunk(768, 50257) == 512
    assert chunk(4096, 50257) == 1024
    assert chunk(4096, 250_000) == 256
    assert chunk(8, 10) == 512
    assert chunk(768, 50257, dtype=torch.bfloat16) == 1024
    assert chunk(768, 50257, dtype=torch.bfloat16, copied=True) == 512


# ---- other ways to call it ---------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_it_compiles_into_one_graph(recompute):
    hidden, weight, labels, loss_weights = make()
    given = {"loss_weights": loss_weights, "recompute": recompute, **OBJECTIVE}

    def both(hidden, weight):
        logits = hidden @ weight.T
        losses = cross_entropy(logits, labels, vocab_size=VOCABULARY)
        return linear_cross_entropy(hidden, weight, labels, **given).loss_sum + losses.sum()

    torch.compiler.reset()
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)

    ours = gradients(compiled(hidden, weight), hidden, weight)
    eager = gradients(both(hidden, weight), hidden, weight)
    for one, other in zip(ours, eager, strict=True):
        assert relative_error(one, other) <= 1e-14


def test_the_graph_ops_pass_torchs_own_check():
    hidden, weight, labels, loss_weights = (x.detach() for x in make())
    packed = [0, VOCABULARY, -100, 10], [0.1, 1e-3], ""
    ops = torch.ops.mds_kernels
    forward = (hidden, weight, labels, loss_weights, True, True, *packed, "torch")
    _, losses, statistics, _, _ = ops.linear_cross_entropy_forward(*forward)

    def check(op, arguments):
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))

    check(ops.linear_cross_entropy_forward, forward)
    check(
        ops.linear_cross_entropy_backward,
        (losses.sum(), *forward[:4], statistics, True, False, *packed, "torch"),
    )
    check(ops.torch_cross_entropy_forward, (hidden @ weight.T, labels, *packed))
    check(
        ops.torch_cross_entropy_backward, (losses, hidden @ weight.T, labels, statistics, *packed)
    )


def test_under_autocast_it_takes_part_as_a_matrix_product():
    hidden, weight, labels, _ = make(torch.float32)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels).loss_sum
    by_hand = linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), labels).loss_sum
    grad_hidden, _ = gradients(loss, hidden, weight)

    assert loss.dtype == torch.float32
    assert torch.equal(loss, by_hand)
    assert grad_hidden.dtype == torch.float32


def test_the_bf16_loss_is_summed_in_fp32():
    """A mean over many tokens in bf16 would be off in the second digit."""
    hidden, weight, labels, _ = make(torch.bfloat16, tokens=2000)

    loss = linear_cross_entropy(hidden, weight, labels, chunk_size=16).loss_sum

    exact = linear_cross_entropy_reference(hidden, weight, labels).loss_sum
    assert loss.dtype == torch.float32
    assert relative_error(loss, exact) <= 1e-4


@pytest.mark.parametrize("label", [VOCABULARY, -1])
def test_a_label_outside_the_vocabulary_is_named(label):
    hidden, weight, labels, _ = make()
    labels[1] = label

    with pytest.raises(ValueError, match=f"label {label} is outside the vocabulary of 43"):
        linear_cross_entropy(hidden, weight, labels, **OBJECTIVE)
    with pytest.raises(ValueError, match=f"label {label} is outside the vocabulary of 43"):
        cross_entropy(hidden @ weight.T, labels, **OBJECTIVE)


def test_another_ignore_index_is_obeyed():
    hidden, weight, labels, _ = make()
    ours = linear_cross_entropy(hidden, weight, labels.where(labels != -100, 3), ignore_index=3)

    exact = linear_cross_entropy_reference(hidden, weight, labels.where(labels != 3, -100))
    assert relative_error(ours.loss_sum, exact.loss_sum) <= 1e-15


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.ones(2, 37, 16)}, "Flatten"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, "labels must be"),
        ({"labels": torch.zeros(37, dtype=torch.int32)}, "labels are torch.int32; they must be"),
        ({"loss_weights": torch.ones(3)}, "loss_weights must be"),
        ({"loss_weights": torch.ones(37, requires_grad=True)}, "no gradient"),
        ({"weight": torch.ones(50, 16)}, "cast one of them"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, message):
    hidden, weight, labels, loss_weights = make()
    given = {"hidden": hidden, "weight": weight, "labels": labels, "loss_weights": loss_weights}

    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{**given, **change})


def test_logits_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="Flatten"):
        cross_entropy(torch.ones(2, 3, 4), torch.zeros(2, dtype=torch.long))
