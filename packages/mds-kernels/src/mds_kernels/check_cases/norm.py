"""Cases of the norms, alone and after a residual add."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Generator, Tensor

from mds_kernels.check import Check, Inputs
from mds_kernels.check_cases.inputs import normal, strided
from mds_kernels.ops import norm

__all__ = ["CASES"]


def _plain_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, 1e-5)


def _plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def _after_add(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(x: Tensor, residual: Tensor, **others: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return function(total, **others), total

    return run


def _norm_inputs(*, is_strided: bool, add: bool, with_bias: bool) -> Callable[[Generator], Inputs]:
    def make(generator: Generator) -> Inputs:
        tensor = strided if is_strided else normal
        inputs: Inputs = {"x": tensor(generator, 13, 41)}
        if add:
            inputs["residual"] = tensor(generator, 13, 41)
        inputs["weight"] = normal(generator, 41)
        if with_bias:
            inputs["bias"] = normal(generator, 41)
        return inputs

    return make


def _norms(*, is_strided: bool) -> tuple[Check, ...]:
    case = "strided" if is_strided else "odd sizes"
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
            inputs=_norm_inputs(
                is_strided=is_strided, add=op.startswith("add"), with_bias="layer" in op
            ),
            run=run,
            reference=reference,
            plain=plain,
        )
        for op, run, reference, plain in table
    )


CASES: tuple[Check, ...] = (*_norms(is_strided=False), *_norms(is_strided=True))
