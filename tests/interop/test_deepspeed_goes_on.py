"""The real DeepSpeed goes on from what we write exactly as if it had never stopped.

It trains, saves, and trains one step more. Its checkpoint goes through another ZeRO stage, form or
number of ranks and comes back; it loads that and takes the same step. Every weight, fp32 master and
moment is then the same, bit by bit. So it is with universal checkpoints, from every stage into the
same. A model trained without ZeRO, and one with experts, for which DeepSpeed reads the format on
one expert-parallel rank only, go on as from an ordinary checkpoint of that kind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from real_megatron import environment

from mds_ckpt import convert, open_checkpoint
from mds_ckpt.diff import compare

pytest.importorskip("torch", reason="DeepSpeed needs torch")
pytest.importorskip("deepspeed", reason="the real DeepSpeed is not installed")

CASES: dict[str, dict[str, Any]] = {
    f"{dtype}-z{stage}": {"stage": stage, "dtype": dtype, "experts": 0}
    for dtype, stages in {"bf16": (0, 1, 2, 3), "fp32": (0, 1, 3), "fp16": (0, 1)}.items()
    for stage in stages
} | {
    "experts-z1": {"stage": 1, "dtype": "bf16", "experts": 4},
    "residual-z2": {"stage": 2, "dtype": "fp32", "experts": 4, "residual": True},
    "experts-z0": {"stage": 0, "dtype": "fp32", "experts": 2},
}
"""What the real DeepSpeed trains, by name; always two data-parallel ranks."""
VIA: dict[str, dict[str, Any]] = {
    "bf16-z0": {"to": "deepspeed", "zero_stage": 3, "pipeline": False, "dp": 3},
    "bf16-z1": {"to": "deepspeed", "zero_stage": 1, "pipeline": True, "pp": 2, "tp": 2, "dp": 3},
    "bf16-z2": {"to": "deepspeed", "zero_stage": 0, "pipeline": True, "pp": 3},
    "bf16-z3": {"to": "universal"},
    "fp32-z0": {"to": "megatron", "tp": 2, "pp": 3},
    "fp32-z1": {"to": "deepspeed", "zero_stage": 3, "dp": 1},
    "fp32-z3": {"to": "mds"},
    "fp16-z0": {"to": "deepspeed", "zero_stage": 2, "tp": 2, "dp": 2},
    "fp16-z1": {"to": "deepspeed", "zero_stage": 1, "dp": 3},
    "experts-z1": {"to": "deepspeed", "zero_stage": 2, "dp": 4, "ep": 4, "tp": 2},
    "residual-z2": {"to": "deepspeed", "zero_stage": 0, "dp": 1},
    "experts-z0": {"to": "mds"},
}
"""Where each checkpoint goes in between."""
if os.environ.get("MDS_INTEROP") != "full":  # as `nox -s interop` sets it
    CASES = {name: CASES[name] for name in ("bf16-z1", "bf16-z3", "fp32-z0", "experts-z1")}


ONE_DIM = (".bias", "layernorm.weight")
"""Ends of the names of one-dimensional parameters, the optimizer's second group."""


def run_ranks(folder: Path, name: str, jobs: list[dict[str, Any]], *, ranks: int = 2) -> None:
    work = folder / f"{name}.json"
    work.write_text(json.dumps(jobs))
    script = str(Path(__file__).with_name("plain_engine.py"))
    run = subprocess.run(
        [sys.executable, script, str(ranks), str(work), str(folder / f"{name}.meeting")],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]


def deepspeed_options(case: dict[str, Any], stage: int) -> dict[str, Any]:
    options = {"to": "deepspeed", "pipeline": False, "zero_stage": stage, "dp": 2}
    return options | ({"ep": 2} if case["experts"] else {})


def universal_jobs(folder: Path, name: str) -> list[dict[str, Any]]:
    """Load a universal checkpoint, and with stage 1 for a model without ZeRO an ordinary one."""
    case, source = CASES[name], folder / "real" / name
    convert(source, folder / f"{name}-universal", to="universal", pipeline=False)
    job = case | {"stage": max(1, case["stage"]), "ep": 1}  # experts are loaded by one rank only
    jobs = [
        job
        | {"universal": True, "load": str(folder / f"{name}-universal")}
        | {"again": str(folder / "loaded" / name), "then": str(folder / "universal" / name)}
    ]
    if case["stage"] == 0 or case["experts"]:
        beside = folder / f"{name}-beside"
        convert(source, beside, **deepspeed_options(case, job["stage"]) | {"ep": 1})
        jobs.append(job | {"load": str(beside), "then": str(folder / "ordinary" / name)})
    return jobs


def assert_equal(first: Path, second: Path, *, but: tuple[str, ...] = ()) -> None:
    """Every number of every state is the same, except of weights whose names end so."""
    ours, theirs = open_checkpoint(first), open_checkpoint(second)
    assert len(ours.states) >= 3, first
    assert ours.counters == theirs.counters, first
    verdict = compare(ours, theirs)
    assert verdict.num_compared == sum(map(len, ours.states.values())), first
    found = [
        str(difference)
        for difference in verdict.differences
        if difference.state not in ("weight", "master") or not difference.tensor.endswith(but)
    ]
    assert not found, (first, found[:4])
    assert bool(verdict.differences) == bool(but), first


@pytest.mark.timeout(600)
def test_one_more_step_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    first = []
    for name, case in CASES.items():
        folders = {"save": str(tmp_path / "real" / name), "then": str(tmp_path / "went" / name)}
        first.append(case | folders | {"steps": 3})
    run_ranks(tmp_path, "first", first)
    (tmp_path / "ours").mkdir()
    second = []
    for name, case in CASES.items():
        convert(tmp_path / "real" / name, tmp_path / f"{name}-there", **VIA[name])
        back = deepspeed_options(case, case["stage"])
        convert(tmp_path / f"{name}-there", tmp_path / "ours" / name, **back)
        load = str(tmp_path / "ours" / name)
        second.append(case | {"load": load, "then": str(tmp_path / "resumed" / name)})
        second += universal_jobs(tmp_path, name)
    run_ranks(tmp_path, "second", second)

    for name, case in CASES.items():
        assert_equal(tmp_path / "went" / name, tmp_path / "resumed" / name)
        assert_equal(tmp_path / "real" / name, tmp_path / "loaded" / name)
        ordinary = tmp_path / "ordinary" / name
        reference = ordinary if ordinary.exists() else tmp_path / "went" / name
        # Stage 3 gives the second group the first one's weight decay when it loads the format.
        but = ONE_DIM if case["stage"] == 3 else ()
        assert_equal(reference, tmp_path / "universal" / name, but=but)
