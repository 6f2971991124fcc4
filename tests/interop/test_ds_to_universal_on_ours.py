"""The real ``ds_to_universal`` reads ours, and writes what we write, tensor by tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from real_megatron import environment

from mds_ckpt import convert

pytest.importorskip("torch", reason="DeepSpeed needs torch")
pytest.importorskip("deepspeed", reason="the real DeepSpeed is not installed")


@pytest.mark.timeout(150)
def test_ds_to_universal_on_ours_equals_our_universal(golden: Path, tmp_path: Path) -> None:
    import torch

    source = golden / "gpt_tp2pp2dp2_z1_bf16" / "ckpt"
    convert(source, tmp_path / "ours", to="deepspeed", tp=2, pp=2)
    convert(source, tmp_path / "direct", to="universal")
    step = next(path for path in (tmp_path / "ours").iterdir() if path.is_dir())
    script = Path(__file__).with_name("universal_tool.py")

    run = subprocess.run(
        [sys.executable, str(script), str(step), str(tmp_path / "theirs" / "global_step10")],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )

    assert run.returncode == 0, run.stderr[-4000:]
    theirs = states_of(tmp_path / "theirs")
    ours = states_of(tmp_path / "direct")
    assert theirs.keys() == ours.keys()
    assert len(theirs) > 150
    different = [key for key in theirs if not torch.equal(theirs[key], ours[key])]
    assert different == []


def states_of(folder: Path) -> dict[str, Any]:
    """The parameters' states below the folder ``zero``, by their path in it."""
    import torch

    (zero,) = folder.rglob("zero")
    found = {}
    for path in sorted(zero.rglob("*.pt")):
        value = torch.load(path, weights_only=False)
        if isinstance(value, dict) and isinstance(value.get("param"), torch.Tensor):
            found[str(path.relative_to(zero))] = value["param"]
    return found
