"""Random reads of files that are not in the page cache, beside a plain memory map and peers.

    pip install megatron-core litdata mosaicml-streaming
    python benchmarks/cold_read.py [--tokens 25000000 100000000 200000000] [--rounds 3]

Before each run the files are dropped from this machine's cache (`POSIX_FADV_DONTNEED`; a cache
below it, such as a host's, is out of reach). Each run is a process of its own, which opens, then
reads 300 samples of 2049 ids in random order; only the reads are timed, by the wall clock. The
share of the files that lay in memory when the reads began is shown: reading all at opening is warm.
Linux only. Data sets are built once a size; peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
from peers import (
    SEQ_LENGTH,
    Contestant,
    Corpus,
    litdata_item,
    memory_map,
    our_copy,
    streaming_item,
)

_SAMPLES = 300


def megatron_window(corpus: Any) -> Contestant:
    """Megatron's reader alone, at the places of the others, without its index caches."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset, _IndexWriter

    prefix = corpus.folder / "megatron" / "corpus"
    if not prefix.parent.exists():
        prefix.parent.mkdir()
        corpus.row.tofile(prefix.with_suffix(".bin"))
        with _IndexWriter(str(prefix.with_suffix(".idx")), np.uint16) as writer:
            writer.write([len(corpus.row)], None, [0, 1])
    source, size = IndexedDataset(str(prefix), mmap=True), SEQ_LENGTH
    return corpus.samples, lambda i: source.get(0, offset=i * size, length=size + 1)


READS = {
    "raw memory map": (memory_map, "raw"),
    "mds-data store.tokens, copied": (our_copy, "store"),
    "Megatron": (megatron_window, "megatron"),
    "litdata": (litdata_item, "litdata"),
    "mosaicml-streaming": (streaming_item, "streaming"),
}


def files_of(folder: Path) -> list[Path]:
    return [folder] if folder.is_file() else [path for path in folder.rglob("*") if path.is_file()]


def drop(paths: list[Path]) -> None:
    """Take files out of the page cache."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def resident(paths: list[Path]) -> float:
    """The share of files that lies in the page cache."""
    done = subprocess.run(
        ["fincore", "--bytes", "--raw", "--noheadings", "--output", "RES,SIZE", *map(str, paths)],
        check=False,
        capture_output=True,
        text=True,
    )
    pairs = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    return sum(res for res, _ in pairs) / max(1, sum(size for _, size in pairs))


def run(name: str, folder: Path, samples: int, seed: int) -> None:
    """Open, read in random order, print the seconds and what was in memory before."""
    build, part = READS[name]
    count, get = build(types.SimpleNamespace(folder=folder, samples=samples))
    warm = resident(files_of(folder / part))
    numbers = np.random.default_rng(seed).permutation(count)[:_SAMPLES].tolist()
    start = time.perf_counter()
    for number in numbers:
        np.asarray(get(number)).sum()
    print(json.dumps({"seconds": time.perf_counter() - start, "resident": warm}))


def compare(folder: Path, tokens: int, *, rounds: int) -> None:
    corpus = Corpus(folder, tokens)
    names = []
    for name, (build, _) in READS.items():
        try:
            build(corpus)[1](0)
            names.append(name)
        except ImportError as error:
            print(f"{name:32s} left out: {error}")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names:
            drop(files_of(folder / READS[name][1]))
            order = [name, str(folder), str(corpus.samples), str(turn)]
            done = subprocess.run(
                [sys.executable, __file__, "--run", *order],
                check=True,
                capture_output=True,
                text=True,
            )
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{len(corpus.row) * 2 / 1e6:.0f} MB")
    base = [each["seconds"] for each in found[names[0]]]
    for name, runs in found.items():
        seconds = [each["seconds"] for each in runs]
        ratio = statistics.median(b / s for b, s in zip(base, seconds, strict=True))
        warm = statistics.median(each["resident"] for each in runs)
        per_sample = statistics.median(seconds) / _SAMPLES * 1e6
        print(
            f"  {name:32s} {ratio:6.2f} x  {per_sample:8.0f} us a sample  {warm:4.0%} in memory",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[25 * 10**6, 10**8, 2 * 10**8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="a folder on the disk that is to be measured")
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        name, folder, samples, seed = options.run
        run(name, Path(folder), int(samples), int(seed))
        return
    for tokens in options.tokens:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            compare(Path(name), tokens, rounds=options.rounds)


if __name__ == "__main__":
    main()
