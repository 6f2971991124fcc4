"""The cases on which every op is compared with float64, by ``mds-kernels verify`` and the tests.

Odd sizes, strided inputs, no rows, all labels ignored, logits of 1e4: where kernels go wrong.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from mds_kernels.check import Check, Inputs
from mds_kernels.ops import bias, cross_entropy, glu, linear_cross_entropy, norm, rope, softmax

__all__ = ["CASES"]


def _normal(generator: Generator, *shape: int, scale: float = 1.0) -> Tensor:
    values = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
    return values.requires_grad_()


def _fixed(generator: Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def _strided(generator: Generator, rows: int, columns: int) -> Tensor:
    return _normal(generator, columns, 2 * rows).detach().T[::2].requires_grad_()


def _far(generator: Generator, rows: int, columns: int) -> Tensor:
    """Return values of which every row lies elsewhere, up to 1e4 from zero."""
    middle = torch.linspace(-1e4, 1e4, rows, dtype=torch.float64)
    return (_normal(generator, rows, columns).detach() + middle[:, None]).requires_grad_()


def _labels(generator: Generator, tokens: int, vocab_size: int) -> Tensor:
    labels = torch.randint(0, vocab_size, (tokens,), generator=generator)
    labels[::7] = -100
    return labels


# ---- vocabulary losses -------------------------------------------------------------------------


def _plain_losses(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    true = logits[:, :vocab_size]
    true = true if true.dtype == torch.float64 else true.float()
    losses = F.cross_entropy(true, labels, reduction="none", label_smoothing=label_smoothing)
    return losses + z_loss * true.logsumexp(dim=1).square() * (labels != -100)


def _plain_linear(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    loss_weights: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    losses = _plain_losses(hidden @ weight.T, labels, **arguments)
    weighted = losses if loss_weights is None else losses * loss_weights
    return weighted.sum(), losses.detach()


def _linear_inputs(
    tokens: int = 37, scale: float = 1.0, *, weigh: bool = True
) -> Callable[[Generator], Inputs]:
    def make(generator: Generator) -> Inputs:
        return {
            "hidden": _normal(generator, tokens, 24, scale=scale),
            "weight": _normal(generator, 101, 24),
            "labels": _labels(generator, tokens, 97),
            "loss_weights": _fixed(generator, tokens) if weigh else None,
        }

    return make


def _strided_linear(generator: Generator) -> Inputs:
    return {
        "hidden": _strided(generator, 37, 24),
        "weight": _strided(generator, 101, 24),
        "labels": _labels(generator, 74, 97)[::2],
    }


def _all_ignored(generator: Generator) -> Inputs:
    inputs = _linear_inputs()(generator)
    return {**inputs, "labels": torch.full((37,), -100)}


def _linear(case: str, inputs: Callable[[Generator], Inputs], **options: Any) -> Check:
    plain_loss = case.startswith("huge logits")
    return Check(
        op="linear_cross_entropy",
        case=case,
        inputs=inputs,
        run=linear_cross_entropy.linear_cross_entropy,
        reference=linear_cross_entropy.linear_cross_entropy_reference,
        plain=_plain_linear,
        # The squared log-sum-exp of huge logits would drown the loss that the case is about.
        arguments={"vocab_size": 97}
        if plain_loss
        else {"vocab_size": 97, "label_smoothing": 0.1, "z_loss": 1e-3},
        options={"chunk_size": 10, **options},
    )


def _cross(case: str, inputs: Callable[[Generator], Inputs], **arguments: Any) -> Check:
    return Check(
        op="cross_entropy",
        case=case,
        inputs=inputs,
        run=cross_entropy.cross_entropy,
        reference=cross_entropy.cross_entropy_reference,
        plain=_plain_losses,
        arguments=arguments,
        options={"chunk_size": 10},
    )


_VOCABULARY = (
    _linear("odd sizes, padding", _linear_inputs()),
    _linear("recomputing", _linear_inputs(), recompute=True),
    _linear("strided", _strided_linear),
    _linear("no tokens", _linear_inputs(tokens=0)),
    _linear("all ignored", _all_ignored),
    _linear("huge logits", _linear_inputs(scale=1000.0, weigh=False)),
    _linear("huge logits, recomputing", _linear_inputs(scale=1000.0, weigh=False), recompute=True),
    _cross(
        "odd sizes, padding",
        lambda g: {"logits": _normal(g, 37, 101), "labels": _labels(g, 37, 97)},
        vocab_size=97,
        label_smoothing=0.1,
        z_loss=1e-3,
    ),
    _cross(
        "strided",
        lambda g: {"logits": _strided(g, 37, 101), "labels": _labels(g, 37, 101)},
    ),
    _cross(
        "no tokens",
        lambda g: {"logits": _normal(g, 0, 101), "labels": _labels(g, 0, 101)},
    ),
    _cross(
        "huge logits",
        lambda g: {"logits": _far(g, 37, 101), "labels": _labels(g, 37, 101)},
    ),
)


# ---- norms -------------------------------------------------------------------------------------


def _plain_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, 1e-5)


def _plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def _after_add(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(x: Tensor, residual: Tensor, **others: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return function(total, **others), total

    return run


def _norm_inputs(*, strided: bool, add: bool, with_bias: bool) -> Callable[[Generator], Inputs]:
    def make(generator: Generator) -> Inputs:
        tensor = _strided if strided else _normal
        inputs: Inputs = {"x": tensor(generator, 13, 41)}
        if add:
            inputs["residual"] = tensor(generator, 13, 41)
        inputs["weight"] = _normal(generator, 41)
        if with_bias:
            inputs["bias"] = _normal(generator, 41)
        return inputs

    return make


def _norms(*, strided: bool) -> tuple[Check, ...]:
    case = "strided" if strided else "odd sizes"
    layer, rms = norm.layer_norm_reference, norm.rms_norm_reference
    table = (
        ("layer_norm", norm.layer_norm, layer, _plain_layer_norm),
        ("rms_norm", norm.rms_norm, rms, _plain_rms_norm),
        ("add_layer_norm", norm.add_layer_norm, _after_add(layer), _after_add(_plain_layer_norm)),
        ("add_rms_norm", norm.add_rms_norm, _after_add(rms), _after_add(_plain_rms_norm)),
    )
    return tuple(
        Check(
            op=op,
            case=case,
            inputs=_norm_inputs(strided=strided, add=op.startswith("add"), with_bias="layer" in op),
            run=run,
            reference=reference,
            plain=plain,
        )
        for op, run, reference, plain in table
    )


# ---- gates, rope, softmax, bias ----------------------------------------------------------------


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
        angles = _fixed(generator, 7, 1, 1, channels // 2) * 6.3
        query = _normal(generator, 7, 2, 3, 10)
        key = _normal(generator, 7, 2, 1, 10)
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
    mask = _fixed(generator, 2, 1, 1, 9) < 0.3
    mask = mask.expand(2, 1, 5, 9).clone()
    mask[0, 0, 2] = True  # a query that sees nothing
    return {"scores": _normal(generator, 2, 3, 5, 9, scale=3.0), "mask": mask}


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
        "x": _normal(generator, 13, 41),
        "bias": _normal(generator, 41),
        "residual": _normal(generator, 13, 41),
        "keep": _fixed(generator, 13, 41) < 0.75,
    }


def _plain_dropout(
    x: Tensor, bias: Tensor, residual: Tensor, keep: Tensor, *, probability: float
) -> Tensor:
    return residual + (x + bias) * keep / (1 - probability)


_OTHERS = (
    *_glu("odd sizes", lambda g: {"x": _normal(g, 3, 5, 34)}),
    *_glu("bias", lambda g: {"x": _normal(g, 13, 34), "bias": _normal(g, 34)}),
    *_glu("strided", lambda g: {"x": _strided(g, 13, 34)}),
    *_glu("no tokens", lambda g: {"x": _normal(g, 0, 34), "bias": _normal(g, 34)}),
    _rope("halves", 10, interleaved=False),
    _rope("halves, partial", 6, interleaved=False),
    _rope("interleaved, partial", 6, interleaved=True),
    _softmax("causal, fewer queries", causal=True, masked=False),
    _softmax("padding, a blind query", causal=False, masked=True),
    _softmax("causal and padding", causal=True, masked=True),
    Check(
        op="bias_gelu",
        case="odd sizes",
        inputs=lambda g: {"x": _normal(g, 13, 41), "bias": _normal(g, 41)},
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

CASES: tuple[Check, ...] = (
    *_VOCABULARY,
    *_norms(strided=False),
    *_norms(strided=True),
    *_OTHERS,
)
"""Every case of every op."""
