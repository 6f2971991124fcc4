"""The bodies of the CUDA kernels, run thread by thread on a CPU, against float64."""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from shim_library import LIBRARY, SANITIZE, build_shim, register, shim_from_environment

from mds_kernels.backends.fused.norm import norm
from mds_kernels.backends.fused.softmax import scaled_masked_softmax
from mds_kernels.check import measure
from mds_kernels.check_cases import CASES

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the shim switches x86-64 stacks"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = ("add_layer_norm", "add_rms_norm", "scaled_masked_softmax")
COVERED = [check for check in CASES if check.op in OPS]


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return shim_from_environment(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="session")
def kernels(library):
    return {packed: register(library, packed=packed) for packed in (False, True)}


@pytest.fixture(params=[0, 1234], ids=["in order", "shuffled"])
def schedule(request, library):
    library.set_seed(request.param)
    yield
    library.set_seed(0)


def through(kernels):
    """Return the op of each name as the public ones are called."""

    def add_layer_norm(x, residual, weight, bias=None, **_):
        return norm(x, residual, weight, bias, eps=1e-5, centred=True, kernels=kernels)

    def add_rms_norm(x, residual, weight, **_):
        return norm(x, residual, weight, None, eps=1e-5, centred=False, kernels=kernels)

    def softmax(scores, mask=None, *, scale, causal, **_):
        return scaled_masked_softmax(scores, mask, scale=scale, causal=causal, kernels=kernels)

    return {
        "add_layer_norm": add_layer_norm,
        "add_rms_norm": add_rms_norm,
        "scaled_masked_softmax": softmax,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("check", COVERED, ids=[f"{one.op}: {one.case}" for one in COVERED])
def test_results_and_gradients_are_as_near_to_float64_as_plain_torch(
    kernels, schedule, check, dtype
):
    measurement = measure(replace(check, run=through(kernels[False])[check.op]), dtype=dtype)

    assert measurement.passed, measurement


def wide(check, columns):
    """Return the check with rows of so many columns."""
    generator = torch.Generator().manual_seed(0)

    def inputs(_):
        if check.op == "scaled_masked_softmax":
            scores = torch.randn(1, 2, 3, columns, generator=generator, dtype=torch.float64)
            mask = torch.rand(1, 1, 1, columns, generator=generator) < 0.3
            return {"scores": scores.requires_grad_(), "mask": mask}
        names = ["x", "residual", "weight", *(["bias"] if "layer" in check.op else [])]
        shapes = {"x": (5, columns), "residual": (5, columns)}
        return {
            name: torch.randn(
                *shapes.get(name, (columns,)), generator=generator, dtype=torch.float64
            ).requires_grad_()
            for name in names
        }

    return replace(check, inputs=inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(
    ("columns", "packed"), [(4099, False), (1, False), (2176, True), (8, True)]
)
@pytest.mark.parametrize("op", OPS)
def test_rows_of_any_length_singly_and_in_packs(kernels, op, columns, packed, dtype):
    check = wide(next(one for one in COVERED if one.op == op), columns)

    measurement = measure(replace(check, run=through(kernels[packed])[op]), dtype=dtype)

    assert measurement.passed, measurement


COLUMNS = 8
FAR = 2**31 // COLUMNS + 1  # a row that begins 2^31 elements behind the first


def value(columns, dtype=torch.bfloat16):
    return torch.rand(1, columns, generator=torch.Generator().manual_seed(columns)).to(dtype)


def rows_of(library, name, row, *, inputs, shared, outputs):
    """Return what row ``row`` gives where it is the last; the pages before are never touched."""

    def placed(x):
        whole = torch.empty(row + 1, x.shape[1], dtype=x.dtype)
        whole[row] = x[0]
        return whole

    given, results = [placed(x) for x in inputs], [placed(x) for x in outputs]
    addresses = [ctypes.c_void_p(one.data_ptr()) for one in (*given, *shared, *results)]
    assert getattr(library, f"{name}_of_row")(*addresses, COLUMNS, row) == 0
    return [one[row] for one in results]


X, STATISTIC = value(COLUMNS), value(1, torch.float32)


@pytest.mark.parametrize(
    ("name", "inputs", "shared", "outputs"),
    [
        ("norm_forward", [X], [X], [X, X, STATISTIC, STATISTIC]),
        ("norm_backward", [X, X, STATISTIC, STATISTIC], [X], [X]),
        ("softmax_forward", [X], [], [X]),
        ("softmax_backward", [X, X], [], [X]),
    ],
)
def test_a_row_behind_two_billion_elements_gives_what_it_gives_as_the_first(
    library, name, inputs, shared, outputs
):
    last, first = (
        rows_of(library, name, row, inputs=inputs, shared=shared, outputs=outputs)
        for row in (FAR, 0)
    )

    for one, other in zip(last, first, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, value(len(one), one.dtype)[0]), "nothing was written"


# ---- the shim itself ---------------------------------------------------------------------------


def test_a_missing_barrier_before_reading_is_found(library):
    assert count_wrong(library, "planted_race", [0]) == 1
    # Shuffled, the first warp comes last in one order of eight, and nothing is amiss.
    assert count_wrong(library, "planted_race", range(1, 21)) >= 13


def test_a_missing_barrier_before_writing_again_is_found(library):
    assert count_wrong(library, "planted_reuse", [0]) == 1
    assert count_wrong(library, "planted_reuse", range(1, 21)) >= 13


def count_wrong(library, name, seeds):
    """Return in how many orders a planted fault shows."""
    wrong = 0
    for seed in seeds:
        library.set_seed(seed)
        values = torch.rand(256)  # fresh: stale sums of the same values would hide the fault
        got = getattr(library, name)(ctypes.c_void_p(values.data_ptr()))
        wrong += abs(got - float(values.sum())) > 1e-3
    library.set_seed(0)
    return wrong


def test_a_barrier_that_only_some_threads_reach_is_an_error(library):
    assert library.planted_divergence() == 1
    assert library.last_fault() == b"divergent barrier: 32 of 64 threads reached it"


# ---- the same under the address sanitizer ------------------------------------------------------


@pytest.fixture(scope="session")
def sanitized(tmp_path_factory):
    if LIBRARY in os.environ:
        pytest.skip("this is the process under the sanitizer")
    return build_shim(tmp_path_factory.mktemp("asan"), *SANITIZE)


def under_sanitizer(command, sanitized):
    runtime = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        )
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = {
        **os.environ,
        LIBRARY: str(sanitized),
        "LD_PRELOAD": ":".join(one.stdout.strip() for one in runtime),
        "ASAN_OPTIONS": "detect_leaks=0,detect_stack_use_after_return=0",
    }
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_no_kernel_reads_or_writes_outside_its_tensors(sanitized):
    here = Path(__file__)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(here)]
    done = under_sanitizer([*command, "-k", "results or singly or barrier"], sanitized)

    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "passed" in done.stdout


def test_a_read_behind_the_end_is_found_with_its_line(sanitized):
    program = (
        "import ctypes, sys, torch\n"
        f"library = ctypes.CDLL({str(sanitized)!r})\n"
        "values = torch.rand(100)\n"
        "library.planted_overrun(ctypes.c_void_p(values.data_ptr()), 100)\n"
    )

    done = under_sanitizer([sys.executable, "-c", program], sanitized)

    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
    assert "shim.cpp" in done.stderr
