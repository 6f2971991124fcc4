"""The compiled CPU kernels, forward and backward, against float64."""

import os
import shutil

import pytest
import torch

import mds_kernels
from mds_kernels import dispatch, why
from mds_kernels.build.compiler import build, too_old_torch
from mds_kernels.build.recipe import recipe_for
from mds_kernels.check import measure
from mds_kernels.check_cases import CASES
from mds_kernels.registry import OPS
from mds_kernels.testing import relative_error

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
    pytest.mark.skipif(too_old_torch() is not None, reason=str(too_old_torch())),
]

WITH_CPU = [op for op in OPS if any(one.backend == "cpu" for one in OPS[op])]
COVERED = [check for check in CASES if check.op in WITH_CPU]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    build(recipe_for("cpu"), folder=folder, environment=os.environ, force=False)
    return folder


@pytest.fixture(autouse=True)
def built(folder, monkeypatch):
    monkeypatch.setenv("MDS_KERNELS_BUILD_DIR", str(folder))
    dispatch._choose.cache_clear()
    yield
    dispatch._choose.cache_clear()


def test_once_built_auto_takes_it_and_a_compiled_graph_does_not():
    assert WITH_CPU == ["rms_norm", "add_layer_norm", "add_rms_norm"]
    # torch's own layer norm is as fast, so ours runs on request only.
    assert why("add_layer_norm").backend == "torch"
    assert why("add_layer_norm", backend="cpu").backend == "cpu"
    for op in ("rms_norm", "add_rms_norm"):
        assert why(op).backend == "cpu"
        assert why(op, compiling=True).backend == "torch"
        assert why(op, dtype=torch.float16).backend == "torch"
        assert why(op, device="cuda").backend == "torch"


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("check", COVERED, ids=[f"{one.op}: {one.case}" for one in COVERED])
def test_results_and_gradients_are_as_near_to_float64_as_plain_torch(check, dtype):
    measurement = measure(check, dtype=dtype, backend="cpu")

    assert measurement.passed, measurement


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shape", [(300, 257), (1, 3), (0, 8), (2, 3, 70)])
def test_many_rows_are_shared_by_threads(threads, shape):
    x, residual = (torch.randn(shape, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(shape[-1], requires_grad=True) for _ in range(2))
    leaves = (x, residual, weight, bias)
    torch.set_num_threads(threads)
    try:
        gradients = []
        for backend in ("cpu", "torch"):
            y, total = mds_kernels.add_layer_norm(*leaves, backend=backend)
            loss = (y * y.detach().cos()).sum() + total.square().sum()
            gradients.append(torch.autograd.grad(loss, leaves))
    finally:
        torch.set_num_threads(1)

    for ours, plain in zip(*gradients, strict=True):
        assert relative_error(ours, plain) <= 2e-6


def test_nan_stays_nan_in_bfloat16():
    x = torch.tensor([[1.0, torch.nan, 2.0]], dtype=torch.bfloat16)

    assert mds_kernels.rms_norm(x, torch.ones(3).bfloat16(), backend="cpu").isnan().all()


def test_mixed_dtypes_are_left_to_torch():
    x = torch.randn(2, 4)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = mds_kernels.rms_norm(x, torch.ones(4), backend="cpu")

    assert result.dtype == torch.float32


def test_it_is_whole_in_a_compiled_graph_and_passes_torchs_own_check():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8)

    def call(x):
        return mds_kernels.rms_norm(x, weight, backend="cpu").square().sum()

    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    ours, plain = (torch.autograd.grad(one(x), x)[0] for one in (compiled, call))
    assert relative_error(ours, plain) <= 1e-6

    ops = torch.ops.mds_kernels
    detached, rstd = x.detach(), torch.rand(3)
    for op, arguments in (
        (ops.cpu_norm_forward, (detached, None, weight, None, 1e-5, False)),
        (ops.cpu_norm_forward, (detached, detached, weight, weight, 1e-5, True)),
        (ops.cpu_norm_backward, (detached, None, detached, weight, rstd, rstd, True, True)),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))
