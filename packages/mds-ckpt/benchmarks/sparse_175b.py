"""Inspect a checkpoint with the layout of a 175B model: tp8, pp16, 96 layers, 2.4 TB of holes.

    python packages/mds-ckpt/benchmarks/sparse_175b.py [--dp 1] [--folder ON_A_DISK]

Headers, pickles and directories are those of real files; where the numbers would be, the files have
holes, so the layout takes a few megabytes. Wall and processor seconds of `mds-ckpt inspect` and its
peak memory are printed.
"""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import synthetic_zero

from mds_ckpt.files.file_operations import REAL
from mds_ckpt.files.zip_writer import ZipWriter
from mds_ckpt.manifest import ModelRecord
from mds_ckpt.megatron.target_layout import TargetLayout
from mds_ckpt.pickles import torch_writer
from mds_ckpt.plan import Options
from mds_ckpt.writers.deepspeed import plan

CONFIG = {
    "num_layers": 96,
    "hidden_size": 12288,
    "num_attention_heads": 96,
    "vocab_size": 50257,
    "max_position_embeddings": 2048,
    "activation": "gelu_tanh",
}
PROGRAM = """
import re, sys
from pathlib import Path
from mds_ckpt.cli import main
code = main(["inspect", sys.argv[1]])
peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
print("peak", peak)
sys.exit(code)
"""


@dataclass(frozen=True)
class Hole:
    """Bytes that are not there."""

    size: int

    def __len__(self) -> int:
        return self.size


class SparseZipWriter(ZipWriter):
    """A zip writer that leaves holes; members with them have no checksum."""

    def _write(self, data: Any) -> None:
        if isinstance(data, Hole):
            self._stream._stream.seek(data.size, 1)  # type: ignore[attr-defined]
            self._at += data.size
        else:
            super()._write(data)

    def add(self, name: str, blocks: Any) -> None:
        blocks = list(blocks)
        if not (blocks and isinstance(blocks[0], Hole)):
            super().add(name, blocks)
            return
        super().add(name, [])
        raw, at, _, _ = self._entries.pop()
        self._stream._stream.seek(-16, 1)  # type: ignore[attr-defined]
        self._at -= 16  # what stands behind the data
        self._write(blocks[0])
        self._write(b"PK\x07\x08" + bytes(4) + blocks[0].size.to_bytes(8, "little") * 2)
        self._entries.append((raw, at, blocks[0].size, 0))


def write(folder: Path, *, dp: int) -> None:
    """Write the layout into a new folder."""
    torch_writer.ZipWriter = SparseZipWriter  # type: ignore[misc]
    torch_writer._blocks = lambda array: [Hole(_nbytes(array))]
    record = ModelRecord(family="gpt", config=CONFIG, vocab_size=50257, tied_embeddings=True)
    folder.mkdir(parents=True)
    checkpoint = synthetic_zero.synthetic(record, folder=folder)
    layout = TargetLayout(tp_size=8, pp_size=16, dp_size=dp)
    plan(checkpoint, Options(), layout=layout).write(folder, REAL)


def _nbytes(array: Any) -> int:
    count = array.dtype.itemsize
    for extent in array.shape:
        count *= extent
    return int(count)


def measure(folder: Path, repeats: int) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    apparent = sum(path.stat().st_size for path in files)
    real = sum(path.stat().st_blocks for path in files) * 512
    print(f"{len(files)} files, {apparent / 1e12:.2f} TB, of which {real / 1e6:.0f} MB are there")
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.perf_counter()
        command = [sys.executable, "-c", PROGRAM, str(folder)]
        text = subprocess.check_output(command, text=True)
        wall = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        peak = re.search(r"peak (\d+)", text)
        assert peak is not None
        assert "nothing is missing" in text, text[-2000:]
        print(f"inspect {wall:.2f} s wall, {cpu:.2f} s cpu, peak {int(peak[1]) / 1024:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        write(Path(folder) / "gpt3", dp=arguments.dp)
        measure(Path(folder) / "gpt3", arguments.repeats)


if __name__ == "__main__":
    main()
