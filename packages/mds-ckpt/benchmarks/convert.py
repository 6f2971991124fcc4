"""Speed and peak memory of a conversion, beside copying the same bytes, at three sizes.

    python packages/mds-ckpt/benchmarks/convert.py [--megabytes 64 256 1024]

Each row converts a Llama-shaped mds checkpoint of that many megabytes to a Hugging Face folder and
back, and copies the same bytes with cp and sync; runs alternate, ratios are of medians. Peak memory
is of a process of its own; the bound is 256 MB and twice the largest tensor.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import ckpt_samples as samples

# Not ru_maxrss: that of a child begins with what its parent had when it forked.
PROGRAM = """
import re, sys, time
from pathlib import Path
from mds_ckpt import convert
start = time.perf_counter()
convert(sys.argv[1], sys.argv[2], to=sys.argv[3])
seconds = time.perf_counter() - start
peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
print(seconds, peak)
"""


def convert(source: Path, target: Path, to: str) -> tuple[float, float]:
    """Seconds and peak megabytes."""
    command = [sys.executable, "-c", PROGRAM, str(source), str(target), to]
    seconds, peak = subprocess.check_output(command, text=True).split()
    return float(seconds), int(peak) / 1024


def copy(source: Path, target: Path) -> float:
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", "-f", target], check=True)
    return time.perf_counter() - start


def measure(folder: Path, megabytes: int, repeats: int) -> None:
    hidden = 512
    layer = (3 * 1024 * hidden + 4 * hidden * hidden) * 4
    layers = max(1, megabytes * 1_000_000 // layer)
    changes = {"hidden_size": hidden, "ffn_hidden_size": 1024, "head_dim": 128}
    model = samples.model("llama", num_layers=layers, vocab_size=8000, **changes)
    source = samples.save(folder / "ckpt", model, samples.arrays(model))
    times: dict[str, list[float]] = {"cp": [], "to hf": [], "to mds": []}
    peaks = []
    for _ in range(repeats):
        times["cp"].append(copy(source, folder / "copy"))
        for to, start in (("hf", source), ("mds", folder / "hf")):
            seconds, peak = convert(start, folder / to, to)
            times[f"to {to}"].append(seconds)
            peaks.append(peak)
        for name in ("copy", "hf", "mds"):
            shutil.rmtree(folder / name)
    shutil.rmtree(folder / "ckpt")
    base = statistics.median(times["cp"])
    row = [f"{name} {statistics.median(t):.2f} s" for name, t in times.items()]
    ratios = [f"{base / statistics.median(times[name]):.2f}" for name in ("to hf", "to mds")]
    print(f"{megabytes:6} MB: {', '.join(row)}; speed against cp {' and '.join(ratios)}; ", end="")
    print(f"peak {max(peaks):.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    for megabytes in arguments.megabytes:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            measure(Path(folder), megabytes, arguments.repeats)


if __name__ == "__main__":
    main()
