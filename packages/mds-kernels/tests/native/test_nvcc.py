"""The CUDA library as users build it: it compiles, fits the registers, and loads anywhere."""

import os
import subprocess
import sys

import pytest

from mds_kernels.build.compiler import build, find_nvcc, too_old_torch
from mds_kernels.build.recipe import recipe_for
from mds_kernels.build.resources import LIMITS, beyond_limits

pytestmark = [
    pytest.mark.skipif(find_nvcc(os.environ) is None, reason="there is no nvcc"),
    pytest.mark.skipif(too_old_torch() is not None, reason=str(too_old_torch())),
]


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    return build(recipe_for("cuda"), folder=folder, environment=os.environ, force=False), folder


def test_every_kernel_is_there_for_every_architecture_without_spills(built):
    usage = built[0].usage

    assert {row.kernel.split("<")[0] for row in usage} == set(LIMITS)
    assert {row.architecture for row in usage} == {"sm_80", "sm_90", "sm_100"}
    assert len(usage) == 33 * 3  # six kernels in three types, five of them in two widths
    assert beyond_limits(usage) == []


def test_a_second_build_finds_the_first(built):
    first, folder = built

    again = build(recipe_for("cuda"), folder=folder, environment={"PATH": ""}, force=False)

    assert again == first
    assert [path.name for path in folder.iterdir()] == [recipe_for("cuda").name]


PROGRAM = """
import sys, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from mds_kernels.backends.cuda import library
library.load(sys.argv[1])
ops = torch.ops.mds_kernels
with FakeTensorMode():
    x = torch.empty(4, 8, dtype=torch.bfloat16, device="cuda")
    w = torch.empty(8, dtype=torch.bfloat16, device="cuda")
    y, total, mean, rstd = ops.cuda_norm_forward(x, x, w, None, 1e-5, True)
    assert (y.shape, y.dtype, y.device.type) == (x.shape, x.dtype, "cuda"), y
    assert (mean.shape, rstd.dtype) == ((4,), torch.float32), mean
    grads = ops.cuda_norm_backward(y, None, total, w, mean, rstd, True, True)
    assert [g.shape for g in grads] == [x.shape, w.shape, w.shape]
    scores = torch.empty(1, 2, 3, 4, device="cuda")
    assert ops.cuda_softmax_forward(scores, None, 0.5, True).shape == scores.shape
    assert ops.cuda_softmax_backward(scores, scores, 0.5).shape == scores.shape
try:
    ops.cuda_softmax_backward(*[torch.ones(1, 1, 1, 4)] * 2, 0.5)
except NotImplementedError as error:
    print(str(error).splitlines()[0])
"""


def test_it_loads_where_there_is_no_gpu_and_tells_shapes(built):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, built[0].library],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert "Could not run 'mds_kernels::cuda_softmax_backward'" in done.stdout
    assert "'CPU' backend" in done.stdout
