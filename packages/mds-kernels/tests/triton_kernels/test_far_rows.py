"""Every Triton kernel at a row that begins more than 2^31 elements behind the first.

One program is interpreted, told that it is the last of very many. The pages between are never
touched, so no memory is needed for them.
"""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: nox -s triton has it")

from triton.runtime.interpreter import interpreter_builder

from mds_kernels.backends.triton.kernels import gate, norm, permutation, rope, softmax, vocabulary

COLUMNS = 8
ROW = 2**31 // COLUMNS + 1


def values(columns=COLUMNS, dtype=torch.bfloat16):
    return torch.rand(1, columns, generator=torch.Generator().manual_seed(columns)).to(dtype)


def near(x):
    """Return the row as the only one."""
    return x.clone()


def far(x):
    """Return a tensor of very many rows, the last of which is ``x``."""
    whole = torch.empty(ROW + 1, x.shape[1], dtype=x.dtype)
    whole[ROW] = x[0]
    return whole


def norm_forward(place, row):
    x, weight = values(), values()[0]
    y, total = place(x), place(x)
    mean, rstd = (place(values(1, torch.float32)) for _ in range(2))
    inputs = (place(x), place(x), weight, weight)
    options = {"CENTRED": True, "HAS_BIAS": True, "BLOCK": COLUMNS}
    norm.add_norm_forward[(1,)](*inputs, y, total, mean, rstd, COLUMNS, 1e-5, **options)
    return y, total, mean, rstd


def norm_backward(place, row):
    """Here a program walks over rows: the second one begins at the far row."""
    x, weight = values(), values()[0]
    statistics = [place(values(1, torch.float32)) for _ in range(2)]
    grad_x = place(x)
    parts = [torch.zeros(2, COLUMNS) for _ in range(2)]
    inputs = (place(x), place(x), place(x), weight, *statistics)
    sizes = (row + 1, COLUMNS, max(row, 1))
    options = {"CENTRED": True, "HAS_BIAS": True, "HAS_GRAD_TOTAL": True, "BLOCK": COLUMNS}
    norm.add_norm_backward[(1,)](*inputs, grad_x, *parts, *sizes, **options)
    return grad_x, *(part.sum(dim=0, keepdim=True) for part in parts)


def gate_forward(place, row):
    y = place(values(COLUMNS // 2))
    options = {"ACTIVATION": 0, "HAS_BIAS": True, "BLOCK": COLUMNS // 2}
    gate.gate_forward[(1,)](place(values()), values()[0], y, COLUMNS // 2, 1, **options)
    return (y,)


def gate_backward(place, row):
    grad_x = place(values())
    inputs = (place(values(COLUMNS // 2)), place(values()), values()[0])
    options = {"ACTIVATION": 0, "HAS_BIAS": True, "BLOCK": COLUMNS // 2}
    gate.gate_backward[(1,)](*inputs, grad_x, COLUMNS // 2, 1, **options)
    return (grad_x,)


def turn(place, row):
    angles = place(values(COLUMNS // 2, torch.float32))
    turned = place(values()), place(values())
    strides = (0, COLUMNS, COLUMNS) * 2 + (0, COLUMNS // 2)
    inputs = (place(values()), place(values()), angles, angles, *turned)
    options = {"INTERLEAVED": False, "BACK": False, "HEADS": 1, "HALF": COLUMNS // 2, "REST": 1}
    rope.rope[(1,)](*inputs, row + 1, *strides, 1, 1, COLUMNS, COLUMNS // 2, **options)
    return turned


def softmax_forward(place, row):
    result = place(values())
    sizes = (1, row + 1, COLUMNS, 0, 0, 0, 0, 0.5)
    options = {"CAUSAL": False, "MASKED": False, "BLOCK": COLUMNS}
    softmax.softmax_forward[(1,)](place(values()), values(), result, *sizes, **options)
    return (result,)


def softmax_backward(place, row):
    grad_scores = place(values())
    inputs = (place(values()), place(values()))
    softmax.softmax_backward[(1,)](*inputs, grad_scores, COLUMNS, 0.5, BLOCK=COLUMNS)
    return (grad_scores,)


def number_of(place, row):
    """Return the row's own number, as its only choice."""
    return place(torch.tensor([[row]]))


def spread(place, row):
    rows = place(values())
    inputs = (place(values()), number_of(place, row), place(values(1)), rows)
    permutation.spread[(1, 1)](*inputs, COLUMNS, 1, WEIGHED=True, BLOCK=COLUMNS)
    return (rows,)


def gather(place, row):
    y = place(values())
    inputs = (place(values()), number_of(place, row), place(values(1)), y)
    permutation.gather[(1, 1)](*inputs, COLUMNS, 1, WEIGHED=True, BLOCK=COLUMNS)
    return (y,)


def dot(place, row):
    products = place(values(1, torch.float32))
    inputs = (place(values()), place(values()), number_of(place, row))
    permutation.dot[(1,)](*inputs, products, COLUMNS, 1, BLOCK=COLUMNS)
    return (products,)


def gradient(place, row):
    out = place(values())
    numbers = [place(values(1, torch.float32)) for _ in range(4)]
    labels = place(torch.tensor([[3]]))
    sizes = (COLUMNS, COLUMNS, COLUMNS, 0)
    inputs = (place(values()), labels, *numbers, out)
    vocabulary.gradient[(1, 1)](*inputs, *sizes, BLOCK=COLUMNS)
    return (out,)


CALLS = [norm_forward, norm_backward, gate_forward, gate_backward, turn]
CALLS += [softmax_forward, softmax_backward, spread, gather, dot, gradient]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_row_behind_two_billion_elements_gives_what_it_gives_as_the_first(monkeypatch, call):
    expected = call(near, 0)
    program = 1 if call is norm_backward else ROW

    def set_index(_, y, z):
        interpreter_builder.grid_idx = (program, y, z)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", set_index)

    for one, other in zip(call(far, ROW), expected, strict=True):
        assert torch.equal(one[-1], other[0])
