"""Every op against float64, and the proof that the comparison notices a wrong kernel."""

from dataclasses import replace

import pytest
import torch

from mds_kernels.check import measure
from mds_kernels.check_cases import CASES
from mds_kernels.registry import OPS

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
IDS = [f"{check.op}: {check.case}" for check in CASES]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("check", CASES, ids=IDS)
def test_results_and_gradients_are_as_near_to_float64_as_plain_torch(check, dtype):
    measurement = measure(check, dtype=dtype)

    assert measurement.passed, measurement


def test_every_op_has_cases():
    assert {check.op for check in CASES} == set(OPS)


class _Spoil(torch.autograd.Function):
    """The identity, with a gradient that is off by a share."""

    @staticmethod
    def forward(ctx, x, share):
        ctx.share = share
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + ctx.share), None


# The first case of each op that has any rows.
FIRST = [next(check for check in CASES if check.op == op) for op in OPS]
WITHOUT_GRADIENT = ("wgrad_accumulate", "adamw")  # they change tensors in place
SHARES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("check", FIRST, ids=[check.op for check in FIRST])
def test_a_slightly_wrong_gradient_fails_the_check(check, dtype):
    if check.op in WITHOUT_GRADIENT:
        pytest.skip("the op has no gradient; its result is spoilt below")

    def wrong(**inputs):
        name = next(iter(inputs))
        return check.run(**{**inputs, name: _Spoil.apply(inputs[name], SHARES[dtype])})

    measurement = measure(replace(check, run=wrong), dtype=dtype)

    assert not measurement.passed
    assert measurement.tensor.startswith("gradient of")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("op", WITHOUT_GRADIENT)
def test_a_slightly_wrong_result_in_place_fails_the_check(op, dtype):
    check = next(check for check in FIRST if check.op == op)

    def wrong(**inputs):
        return check.run(**inputs) * (1 + SHARES[dtype])

    assert not measure(replace(check, run=wrong), dtype=dtype).passed


@pytest.mark.parametrize("check", FIRST, ids=[check.op for check in FIRST])
def test_a_result_that_was_never_written_fails_the_check(check):
    def forgetful(**inputs):
        result = check.run(**inputs)
        first = result if isinstance(result, torch.Tensor) else result[0]
        unwritten = first * torch.empty(first.shape, dtype=first.dtype)
        return unwritten if isinstance(result, torch.Tensor) else (unwritten, *result[1:])

    assert not measure(replace(check, run=forgetful), dtype=torch.float32).passed
