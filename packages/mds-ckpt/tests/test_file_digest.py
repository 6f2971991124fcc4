"""Digests that are computed while their bytes are written."""

from __future__ import annotations

import errno
import hashlib
import threading
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from mds_ckpt.files.file_digest import FileDigest
from mds_ckpt.files.file_operations import FileOperations
from mds_ckpt.files.safetensors_file import SafetensorsWriter, TensorSpec
from mds_ckpt.tensors.checksum import as_hex, crc32c

MB = 1 << 20


def test_parts_of_any_size_count_in_their_order() -> None:
    digest, expected = FileDigest(), hashlib.sha256()
    for number, nbytes in enumerate((3, 5 * MB, 0, 100, 2 * MB, MB)):
        data = bytes([number]) * nbytes
        with digest.taking(memoryview(data)):
            pass
        expected.update(data)
    digest.close()

    assert digest.hexdigest() == expected.hexdigest()


def test_an_array_may_change_as_soon_as_it_is_written(tmp_path: Path) -> None:
    shape = (4 * MB,)
    array = np.zeros(shape, "u1")
    specs = [TensorSpec(name, "U8", shape) for name in ("a", "b", "c")]
    with SafetensorsWriter(tmp_path / "x", specs) as writer:
        for number, spec in enumerate(specs):
            array[:] = number
            writer.write(spec.name, array)

    written = writer.result
    assert written.sha256 == hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest()
    assert written.crc32c["b"] == as_hex(crc32c(np.ones(shape, "u1")))


class _FullDisk(FileOperations):
    def write(self, file: BinaryIO, data: memoryview) -> None:
        if len(data) > MB:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(file, data)


def test_a_failed_write_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    specs = [TensorSpec("a", "U8", (4 * MB,))]

    with (
        pytest.raises(OSError, match="No space left"),
        SafetensorsWriter(tmp_path / "x", specs, operations=_FullDisk()) as writer,
    ):
        writer.write("a", np.zeros(4 * MB, "u1"))

    assert threading.active_count() == before
