"""Whether Triton can be used is told without importing it, and never stops a program."""

import importlib.util
import shutil
import subprocess
import sys

import pytest
import torch

from mds_kernels import why
from mds_kernels.backends.triton import availability


@pytest.fixture
def gpu(monkeypatch):
    """A machine with everything that Triton needs; tests take one thing away."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")


def test_with_everything_in_place_nothing_speaks_against_it(gpu, tmp_path):
    assert availability.why_not("cuda", {"TRITON_CACHE_DIR": str(tmp_path / "new")}) is None


def test_without_the_package_that_is_the_reason(gpu, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    assert "triton is not installed" in availability.why_not("cuda", {})


def test_an_old_gpu_is_named(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))

    assert "the GPU is sm_75" in availability.why_not("cuda", {})


def test_without_a_compiler_it_says_what_to_install(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    place = {"TRITON_CACHE_DIR": str(tmp_path)}

    assert "install gcc or clang, or set CC" in availability.why_not("cuda", place)
    assert availability.why_not("cuda", {**place, "CC": "/opt/cc"}) is None


def test_a_read_only_home_is_named_with_the_remedy(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(availability.os, "access", lambda path, mode: False)

    told = availability.why_not("cuda", {"TRITON_HOME": str(tmp_path)})

    assert f"can't write to {tmp_path}" in told
    assert "set TRITON_CACHE_DIR" in told


def test_on_a_cpu_it_is_interpreted_on_request_only(gpu):
    assert "only interpreted" in availability.why_not("cpu", {})
    assert availability.why_not("cpu", {"TRITON_INTERPRET": "1"}) is None
    assert "not on mps" in availability.why_not("mps", {})


def test_looking_for_it_imports_nothing():
    program = (
        "import sys\nfrom mds_kernels import why\n"
        "why('swiglu', device='cuda')\nwhy('swiglu')\nprint('triton' in sys.modules)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout == "False\n"


def test_torch_runs_where_triton_can_not():
    choice = why("swiglu", device="cpu")

    assert choice.backend == "torch"
    assert dict(choice.others)["triton"]
