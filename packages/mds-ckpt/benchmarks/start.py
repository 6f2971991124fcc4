"""How long the command line takes: --help and inspect, beside Python's own start.

    python packages/mds-ckpt/benchmarks/start.py [--repeats 20]

Runs alternate; medians of wall and of processor time are printed (the latter feels load less).
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import ckpt_samples as samples


def timed(command: list[str]) -> tuple[float, float]:
    """Wall and processor seconds of one run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        commands = {"python -c pass": [sys.executable, "-c", "pass"]}
        ours = [sys.executable, "-m", "mds_ckpt"]
        commands["--help"] = [*ours, "--help"]
        for layers in (33, 333):
            model = samples.model("llama", num_layers=layers)
            path = samples.save(Path(folder) / str(layers), model, samples.arrays(model))
            commands[f"inspect {6 * layers + 3} tensors"] = [*ours, "inspect", str(path)]
        found = {name: [] for name in commands}
        for _ in range(repeats):
            for name, command in commands.items():
                found[name].append(timed(command))
    print(f"{'':24} {'wall ms':>9} {'cpu ms':>9}")
    for name, times in found.items():
        wall, spent = (statistics.median(column) * 1000 for column in zip(*times, strict=True))
        print(f"{name:24} {wall:9.0f} {spent:9.0f}")


if __name__ == "__main__":
    main()
