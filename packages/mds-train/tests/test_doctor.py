from __future__ import annotations

import os
from pathlib import Path

from mds_train.doctor import Finding, examine, shared_memory_leftovers, stale_locks


def test_an_old_lock_is_stale_and_a_fresh_one_is_not(tmp_path: Path) -> None:
    for name, age in (("old", 3600.0), ("fresh", 10.0)):
        lock = tmp_path / name / "lock"
        lock.parent.mkdir()
        lock.touch()
        os.utime(lock, (1e9 - age, 1e9 - age))

    assert stale_locks(tmp_path, now=1e9) == [tmp_path / "old" / "lock"]
    assert stale_locks(tmp_path / "nowhere", now=1e9) == []


def test_buffers_of_killed_runs_are_found(tmp_path: Path) -> None:
    (tmp_path / "deepspeed_allreduce_buffer_0_x").touch()
    (tmp_path / "other").touch()

    assert [path.name for path in shared_memory_leftovers(tmp_path)] == [
        "deepspeed_allreduce_buffer_0_x"
    ]


def test_the_report_covers_versions_devices_kernels_and_disk(tmp_path: Path) -> None:
    findings = examine(extensions=tmp_path, cores=2, folder=tmp_path)

    subjects = {finding.subject for finding in findings}
    assert {"system", "torch", "deepspeed", "mds-ckpt", "disk"} <= subjects
    assert any(subject.startswith("kernel ") for subject in subjects)
    assert subjects & {"devices", "cuda:0"}


def test_a_finding_with_a_remedy_is_a_problem() -> None:
    assert Finding(subject="disk", text="full", remedy="free some space").is_problem
    assert not Finding(subject="disk", text="9 GiB free").is_problem
