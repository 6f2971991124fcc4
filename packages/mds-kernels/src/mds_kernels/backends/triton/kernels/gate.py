"""Gated activations: one program a block of one row's channels.

Letters: f width of the MLP; a row of the input has the gate's f channels, then those it gates.
"""
# ruff: noqa: ANN001, ANN201, ANN202, N803, D103
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

SILU = tl.constexpr(0)
GELU_ERF = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
_TWICE_SLOPE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_CUBE = tl.constexpr(0.044715)


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):
    """Return the activation of the gate and its derivative."""
    if ACTIVATION == SILU:
        share = tl.sigmoid(gate)
        value = gate * share
        slope = share * (1.0 + gate * (1.0 - share))
    elif ACTIVATION == GELU_ERF:
        share = 0.5 * (1.0 + tl.math.erf(gate * _SQRT_HALF))
        value = gate * share
        slope = share + gate * _DENSITY * tl.exp(gate * gate * -0.5)
    else:
        # tanh(x) = 2 sigmoid(2 x) - 1, so this half of 1 + tanh is a sigmoid.
        share = tl.sigmoid((gate + gate * gate * gate * _CUBE) * _TWICE_SLOPE)
        value = gate * share
        inner = gate * gate * _CUBE * 3.0 + 1.0
        slope = share + gate * share * (1.0 - share) * inner * _TWICE_SLOPE
    return value, slope


@triton.jit
def _load_pair(x_ptr, bias_ptr, row, channel, inside, width, HAS_BIAS: tl.constexpr):
    place = row * 2 * width + channel
    gate = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + place + width, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        gate += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + width + channel, mask=inside, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def gate_forward(
    x_ptr,
    bias_ptr,
    y_ptr,
    width,
    blocks,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    channel = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    gate, up = _load_pair(x_ptr, bias_ptr, row, channel, inside, width, HAS_BIAS)
    value, _ = activate(gate, ACTIVATION)
    y = (value * up).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * width + channel, y, mask=inside)


@triton.jit
def gate_backward(
    grad_ptr,
    x_ptr,
    bias_ptr,
    grad_x_ptr,
    width,
    blocks,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    channel = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    gate, up = _load_pair(x_ptr, bias_ptr, row, channel, inside, width, HAS_BIAS)
    value, slope = activate(gate, ACTIVATION)
    gradient = tl.load(grad_ptr + row * width + channel, mask=inside, other=0.0).to(tl.float32)
    place = grad_x_ptr + row * 2 * width + channel
    tl.store(place, (gradient * up * slope).to(grad_x_ptr.dtype.element_ty), mask=inside)
    tl.store(place + width, (gradient * value).to(grad_x_ptr.dtype.element_ty), mask=inside)
