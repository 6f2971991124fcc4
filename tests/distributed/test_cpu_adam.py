"""DeepSpeed's CPU Adam against torch's, in ZeRO's stages, offloaded in part, and over a resume.

It is compiled first, which takes minutes: with the environment variable MDS_PARITY=full only, as
`nox -s parity` sets it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import checkpoint_differences, train_each
from tiny_run import make_store, tiny_config

from mds_kernels.testing import TOLERANCES, run_ranks

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        os.environ.get("MDS_PARITY") != "full", reason="compiles for minutes; nox -s parity"
    ),
    pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler"),
]

ON_HOST = {"offload_optimizer": "cpu"}
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "z0": {"parallel": {"zero_stage": 0}},
    "z1": {"parallel": {"zero_stage": 1}},
    "z2": {"parallel": {"zero_stage": 2}, "memory": ON_HOST},
    "z3": {"parallel": {"zero_stage": 3}, "memory": {**ON_HOST, "offload_ratio": 0.5}},
}


def test_it_steps_as_torch_does_and_goes_on_bitwise(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    own = {"optimizer": {"implementation": "deepspeed-cpu"}}
    every = {"checkpoint": {"save_interval": 3}}
    configs = [tiny_config(store, tmp_path / "torch", **every)]
    for name, changes in RUNS.items():
        step = tmp_path / name / "checkpoints" / "step-3"
        configs.append(tiny_config(store, tmp_path / name, **changes, **own, **every))
        on = {"checkpoint": {"load": str(step)}}
        configs.append(tiny_config(store, tmp_path / f"{name}-on", **changes, **own, **on))

    expected, *found = run_ranks(train_each, 1, configs, timeout=1000)[0]

    tolerance = TOLERANCES["layout_loss_float32"]
    for name, whole, half in zip(RUNS, found[::2], found[1::2], strict=True):
        assert whole.losses == pytest.approx(expected.losses, rel=tolerance), name
        assert half.losses == whole.losses[3:], name
        ends = [tmp_path / each / "checkpoints" / "step-6" for each in (name, f"{name}-on")]
        assert checkpoint_differences(*ends) == []
