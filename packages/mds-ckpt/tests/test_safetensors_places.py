"""Safetensors files that several threads fill, each at its place."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from mds_ckpt.files.safetensors_header import TensorSpec
from mds_ckpt.files.safetensors_places import PlacedSafetensors

SPECS = [TensorSpec("w", "F32", (100, 3)), TensorSpec("b", "BF16", (3,))]
W = np.arange(300, dtype="f4").reshape(100, 3)
B = np.ones(3, ml_dtypes.bfloat16)


def check(path: Path) -> None:
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert np.array_equal(file.get_tensor("w"), W)
        assert file.get_slice("b").get_shape() == [3]
    assert path.read_bytes().endswith(B.tobytes())


def test_the_official_library_reads_what_threads_wrote_from_the_end_on(tmp_path: Path) -> None:
    with (
        PlacedSafetensors(tmp_path / "x", SPECS, metadata={"format": "pt"}) as file,
        ThreadPoolExecutor(4) as pool,
    ):
        file.write("b", [B])
        list(pool.map(lambda row: file.write("w", [W[row]], start=3 * row), reversed(range(100))))

    check(tmp_path / "x")


def test_arrays_follow_each_other_in_row_major_order(tmp_path: Path) -> None:
    with PlacedSafetensors(tmp_path / "x", SPECS, metadata={"format": "pt"}) as file:
        file.write("w", [W[:40], W.T[:, 40:].T.astype(">f4"), np.empty((0, 3), "f4")])
        file.write("b", [B[:1], B[1:]])

    check(tmp_path / "x")


@pytest.mark.skipif(not hasattr(os, "pwrite"), reason="the system writes at the file's position")
def test_a_system_call_that_takes_a_part_is_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: write(fd, data[: len(data) // 3 + 1], at)
    )

    with PlacedSafetensors(tmp_path / "x", SPECS, metadata={"format": "pt"}) as file:
        file.write("w", [W])
        file.write("b", [B])

    check(tmp_path / "x")


@pytest.mark.skipif(not hasattr(os, "pwrite"), reason="the system writes at the file's position")
def test_a_part_that_the_system_only_claims_to_have_taken_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda _fd, _data, _at: 7)

    with pytest.raises(OSError, match="took less than it said") as caught:
        PlacedSafetensors(tmp_path / "x", SPECS)

    assert caught.value.filename == str(tmp_path / "x")


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ([("w", W, 0)], "'b' lacks 3 elements"),
        ([("b", B, 0), ("w", W[:99], 0)], "'w' lacks 3 elements"),
        ([("b", B, 0), ("w", W, 0), ("w", W[:1], 0)], "'w' lacks -3 elements"),
        ([("w", W, 3)], "'w' was declared as F32"),
        ([("b", W, 0)], "'b' was declared as BF16"),
    ],
)
def test_what_is_not_written_exactly_once_is_an_error(
    tmp_path: Path, written: list[tuple[str, Any, int]], reason: str
) -> None:
    def write() -> None:
        with PlacedSafetensors(tmp_path / "x", SPECS) as file:
            for name, array, start in written:
                file.write(name, [array], start=start)

    with pytest.raises(ValueError, match=reason):
        write()
