"""Cases of gates, rope, softmax, and what follows a bias."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from mds_kernels.check import Check, Inputs
from mds_kernels.check_cases.inputs import fixed, normal, strided
from mds_kernels.ops import bias, glu, rope, softmax

__all__ = ["CASES"]


def _plain_swiglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    gate, up = (x if bias is None else x + bias).chunk(2, dim=-1)
    return F.silu(gate) * up


def _plain_geglu(x: Tensor, bias: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    gate, up = (x if bias is None else x + bias).chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def _glu(case: str, inputs: Callable[[Generator], Inputs]) -> tuple[Check, ...]:
    swiglu = Check(
        op="swiglu",
        case=case,
        inputs=inputs,
        run=glu.swiglu,
        reference=glu.swiglu_reference,
        plain=_plain_swiglu,
    )
    geglus = (
        Check(
            op="geglu",
            case=f"{case}, {approximate}",
            inputs=inputs,
            run=glu.geglu,
            reference=glu.geglu_reference,
            plain=_plain_geglu,
            arguments={"approximate": approximate},
        )
        for approximate in ("none", "tanh")
    )
    return swiglu, *geglus


def _rope_inputs(channels: int) -> Callable[[Generator], Inputs]:
    def make(generator: Generator) -> Inputs:
        angles = fixed(generator, 7, 1, 1, channels // 2) * 6.3
        query = normal(generator, 7, 2, 3, 10)
        key = normal(generator, 7, 2, 1, 10)
        return {"query": query, "key": key, "cos": angles.cos(), "sin": angles.sin()}

    return make


def _reference_rope(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    return (
        rope.rope_reference(query, cos, sin, interleaved=interleaved),
        rope.rope_reference(key, cos, sin, interleaved=interleaved),
    )


def _plain_rope(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    # In the inputs' dtype, as most models do; channels in pairs (k, k + r / 2) or (2 k, 2 k + 1).
    def rotate(x: Tensor) -> Tensor:
        turned, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
        pairs = turned.reshape(*turned.shape[:-1], *((-1, 2) if interleaved else (2, -1)))
        first, second = pairs.unbind(-1 if interleaved else -2)
        both = torch.stack(
            [first * cos - second * sin, second * cos + first * sin], -1 if interleaved else -2
        )
        return torch.cat([both.flatten(-2), rest], dim=-1)

    return rotate(query), rotate(key)


def _rope(case: str, channels: int, *, interleaved: bool) -> Check:
    return Check(
        op="rope",
        case=case,
        inputs=_rope_inputs(channels),
        run=rope.rope,
        reference=_reference_rope,
        plain=_plain_rope,
        arguments={"interleaved": interleaved},
    )


def _plain_softmax(
    scores: Tensor, mask: Tensor | None = None, *, scale: float, causal: bool
) -> Tensor:
    hidden = torch.zeros_like(scores, dtype=torch.bool)
    if causal:
        hidden = ~torch.ones_like(hidden).tril(scores.shape[-1] - scores.shape[-2])
    hidden = hidden if mask is None else hidden | mask
    scaled = (scores * scale).masked_fill(hidden, torch.finfo(scores.dtype).min)
    # A row without a visible key would come out uniform.
    return scaled.softmax(dim=-1) * ~hidden.all(dim=-1, keepdim=True)


def _softmax_inputs(generator: Generator) -> Inputs:
    mask = fixed(generator, 2, 1, 1, 9) < 0.3
    mask = mask.expand(2, 1, 5, 9).clone()
    mask[0, 0, 2] = True  # a query that sees nothing
    return {"scores": normal(generator, 2, 3, 5, 9, scale=3.0), "mask": mask}


def _softmax(case: str, *, causal: bool, masked: bool) -> Check:
    def make(generator: Generator) -> Inputs:
        inputs = _softmax_inputs(generator)
        return inputs if masked else {"scores": inputs["scores"]}

    return Check(
        op="scaled_masked_softmax",
        case=case,
        inputs=make,
        run=softmax.scaled_masked_softmax,
        reference=softmax.scaled_masked_softmax_reference,
        plain=_plain_softmax,
        arguments={"scale": 0.3, "causal": causal},
    )


def _dropout_inputs(generator: Generator) -> Inputs:
    return {
        "x": normal(generator, 13, 41),
        "bias": normal(generator, 41),
        "residual": normal(generator, 13, 41),
        "keep": fixed(generator, 13, 41) < 0.75,
    }


def _plain_dropout(
    x: Tensor, bias: Tensor, residual: Tensor, keep: Tensor, *, probability: float
) -> Tensor:
    return residual + (x + bias) * keep / (1 - probability)


CASES: tuple[Check, ...] = (
    *_glu("odd sizes", lambda g: {"x": normal(g, 3, 5, 34)}),
    *_glu("bias", lambda g: {"x": normal(g, 13, 34), "bias": normal(g, 34)}),
    *_glu("strided", lambda g: {"x": strided(g, 13, 34)}),
    *_glu("no tokens", lambda g: {"x": normal(g, 0, 34), "bias": normal(g, 34)}),
    _rope("halves", 10, interleaved=False),
    _rope("halves, partial", 6, interleaved=False),
    _rope("interleaved, partial", 6, interleaved=True),
    _softmax("causal, fewer queries", causal=True, masked=False),
    _softmax("padding, a blind query", causal=False, masked=True),
    _softmax("causal and padding", causal=True, masked=True),
    Check(
        op="bias_gelu",
        case="odd sizes",
        inputs=lambda g: {"x": normal(g, 13, 41), "bias": normal(g, 41)},
        run=bias.bias_gelu,
        reference=bias.bias_gelu_reference,
        plain=lambda x, bias: F.gelu(x + bias),
    ),
    Check(
        op="bias_dropout_add",
        case="given mask",
        inputs=_dropout_inputs,
        run=bias.bias_dropout_add,
        reference=bias.bias_dropout_add_reference,
        plain=_plain_dropout,
        arguments={"probability": 0.25},
    ),
)
