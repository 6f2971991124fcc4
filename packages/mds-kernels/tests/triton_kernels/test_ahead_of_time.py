"""No kernel spills registers on a GPU that is not here: compiled for three architectures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: nox -s triton has it")

REGISTERS = {
    "add_norm_forward": 64,
    "add_norm_backward": 128,
    "gate_forward": 32,
    "gate_backward": 48,
    "rope": 48,
    "softmax_forward": 64,
    "softmax_backward": 40,
    "spread": 24,
    "gather": 40,
    "dot": 40,
    "statistics": 64,
    "gradient": 64,
}
"""The most that a kernel may use; more would leave fewer warps to hide the memory's latency."""

STACK = 8  # bytes; one 64-bit pointer that ptxas parks outside the loop on sm_80


@pytest.fixture(scope="module")
def usage(tmp_path_factory):
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "ahead_of_time.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_every_kernel_is_compiled_for_every_architecture(usage):
    compiled = {(row["kernel"], row["architecture"]) for row in usage}

    wanted = {(name, arch) for name in REGISTERS for arch in ("sm_80", "sm_90", "sm_100")}
    assert compiled == wanted


def test_no_kernel_spills_or_outgrows_the_table(usage):
    too_much = [
        row for row in usage if row["stack"] > STACK or row["registers"] > REGISTERS[row["kernel"]]
    ]

    assert too_much == []
