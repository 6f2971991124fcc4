"""Many files of one conversion: alike for any number of jobs, and on the disk before the rename."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ckpt_samples as samples
import numpy as np
import pytest
from ckpt_disks import RecordingDisk
from deepspeed_samples import Sample

from mds_ckpt import convert
from mds_ckpt.files.file_operations import REAL
from mds_ckpt.writers.torch_files import write_torch_files


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("to", ["universal", "hf"])
def test_any_number_of_jobs_writes_the_same_bytes(tmp_path: Path, to: str) -> None:
    source = Sample(tp=2, pp=2, dp=2, layers=4).write(tmp_path / "in")

    for jobs in (1, 3):
        convert(source, tmp_path / str(jobs), to=to, jobs=jobs)

    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def test_large_matrices_are_transposed_alike_for_any_number_of_jobs(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "ffn_hidden_size": 4500, "num_layers": 1}
    record = samples.model("gpt2", **sizes)
    source = samples.save(tmp_path / "ckpt", record, samples.arrays(record))

    for jobs in (1, 2):
        convert(source, tmp_path / str(jobs), to="hf", jobs=jobs)

    assert contents(tmp_path / "1") == contents(tmp_path / "2")


@pytest.mark.parametrize("jobs", [1, 3])
def test_the_first_failure_ends_it(tmp_path: Path, jobs: int) -> None:
    class Unreadable:
        shape = (2,)
        dtype = np.dtype("f4")

        def numpy(self) -> Any:
            raise OSError("gone")

    files = {f"{i}.pt": {"w": Unreadable() if i == 1 else np.zeros(2)} for i in range(4)}

    with pytest.raises(OSError, match="gone"):
        write_torch_files(tmp_path, files, jobs=jobs, operations=REAL)


def test_every_file_and_folder_is_forced_to_the_disk_before_the_rename(tmp_path: Path) -> None:
    source = Sample().write(tmp_path / "in")
    disk = RecordingDisk(tmp_path)

    convert(source, tmp_path / "out", to="universal", operations=disk)

    renamed = next(i for i, entry in enumerate(disk.log) if entry[0] == "rename")
    before = disk.log[:renamed]
    last = {entry[1]: i for i, entry in enumerate(before) if entry[0] in ("write", "create")}
    synced = {entry[1]: i for i, entry in enumerate(before) if entry[0] == "sync"}
    kept = {path: at for path, at in last.items() if ("remove", path) not in before}
    assert len(kept) > 50
    assert [path for path, at in kept.items() if synced.get(path, -1) < at] == []
    folders = {entry[1] for entry in before if entry[0] == "folder"}
    assert folders <= {entry[1] for entry in before if entry[0] == "sync folder"}
