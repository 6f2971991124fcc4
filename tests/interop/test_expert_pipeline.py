"""The real DeepSpeed with experts in a pipeline: its files are read, and it goes on from ours.

It trains, saves, and trains one step more. Its checkpoint goes to our format and back; it loads
that and takes the same step: every weight, master and moment is then the same, bit by bit. From a
universal checkpoint it goes on as from an ordinary one, where each rank holds all experts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from real_megatron import environment

from mds_ckpt import Checkpoint, convert, open_checkpoint

pytest.importorskip("torch", reason="DeepSpeed needs torch")
pytest.importorskip("deepspeed", reason="the real DeepSpeed is not installed")

STATES = ("weight", "master", "exp_avg", "exp_avg_sq")


def run_ranks(folder: Path, name: str, *jobs: dict[str, Any]) -> None:
    work = folder / f"{name}.json"
    work.write_text(json.dumps(jobs))
    script = str(Path(__file__).with_name("expert_pipeline.py"))
    run = subprocess.run(
        [sys.executable, script, str(work), str(folder / f"{name}.meeting")],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]


@pytest.mark.timeout(600)
def test_a_pipeline_with_experts_goes_on_bit_by_bit(tmp_path: Path) -> None:
    real, wanted, ours, found = (tmp_path / n for n in ("real", "wanted", "ours", "found"))
    run_ranks(tmp_path, "first", {"save": str(real), "then": str(wanted)})
    convert(real, tmp_path / "between", to="mds")
    convert(tmp_path / "between", ours, to="deepspeed", pp=2, dp=2, ep=2)
    convert(real, tmp_path / "alone", to="deepspeed", pp=2, dp=2)
    convert(real, tmp_path / "universal", to="universal", pipeline=True)
    names = [{path.name for path in folder.rglob("*.pt")} for folder in (real, ours)]
    assert names[0] == names[1]

    run_ranks(
        tmp_path,
        "second",
        {"load": str(ours), "then": str(found)},
        {"ep": 1, "load": str(tmp_path / "alone"), "then": str(tmp_path / "ordinary")},
        {"ep": 1, "universal": True, "load": str(tmp_path / "universal")}
        | {"again": str(tmp_path / "loaded"), "then": str(tmp_path / "went")},
    )

    source, expected, again = (open_checkpoint(folder) for folder in (real, wanted, found))
    assert all(len(tensors) == 78 for tensors in source.states.values())
    for name, master in source.states["master"].items():
        weight = source.tensor(name).numpy()
        assert master.numpy().astype(weight.dtype).tobytes() == weight.tobytes(), name
    assert set(expected.states) == set(STATES)
    assert_equal(expected, again)
    assert_equal(source, open_checkpoint(tmp_path / "universal"))
    assert_equal(source, open_checkpoint(tmp_path / "loaded"))
    assert_equal(*(open_checkpoint(tmp_path / name) for name in ("ordinary", "went")))


def assert_equal(first: Checkpoint, second: Checkpoint) -> None:
    """Every number of every state is the same, bit by bit."""
    for state in STATES:
        assert first.states[state].keys() == second.states[state].keys()
        for name, tensor in first.states[state].items():
            assert second.tensor(name, state).numpy().tobytes() == tensor.numpy().tobytes(), name
