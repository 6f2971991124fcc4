"""The real DeepSpeed loads what ``mds-ckpt convert --to deepspeed`` writes, and trains on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from real_megatron import environment

from mds_ckpt import convert, open_checkpoint

pytest.importorskip("torch", reason="DeepSpeed needs torch")
pytest.importorskip("deepspeed", reason="the real DeepSpeed is not installed")


@pytest.mark.timeout(150)
def test_real_deepspeed_loads_ours_and_takes_one_more_step(golden: Path, tmp_path: Path) -> None:
    source = golden / "gpt_tp2pp2dp2_z1_bf16" / "ckpt"
    convert(source, tmp_path / "ours", to="deepspeed", tp=1, pp=2)
    states = open_checkpoint(source).states
    expected = {
        f"{state}/{name}": tensor.numpy().astype("f4")
        for state in ("weight", "master", "exp_avg", "exp_avg_sq")
        for name, tensor in states[state].items()
    }
    np.savez(tmp_path / "expected.npz", **expected)
    arguments = [tmp_path / "ours", "2", tmp_path / "expected.npz", tmp_path / "meeting"]

    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("engine_rank.py")), *map(str, arguments)],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )

    assert run.returncode == 0, run.stderr[-4000:]
    assert "rank 0: 26 parameters as written, step 11" in run.stdout
    assert "rank 1: 27 parameters as written, step 11" in run.stdout
