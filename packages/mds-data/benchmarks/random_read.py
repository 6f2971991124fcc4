"""Random reads of 2049 tokens, warm, one process: this package against a raw memory map.

Every reader gets short blocks in turn, many rounds, so that a busy machine disturbs all alike. The
figures are medians over rounds of the ratio to the memory map, by CPU time and by wall time; trust
the first on a busy machine.

    python random_read.py [--tokens 20000000 100000000] [--rounds 25] [--folder FOLDER]
"""

import argparse
import mmap
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from mds_data import GPTDataset, open_store, write_store

SEQ_LENGTH = 2048
VOCAB_SIZE = 50257


def make_documents(tokens, seed=0):
    """Log-normal document lengths, ids of a Zipf distribution."""
    random = np.random.default_rng(seed)
    left = tokens
    while left > 0:
        length = min(left, max(1, int(random.lognormal(5.6, 1.1))))
        yield (random.zipf(1.15, length) % VOCAB_SIZE).astype(np.uint16)
        left -= length


def raw_map(path):
    """The whole file as one row of tokens, the fastest that there is in numpy."""
    handle = os.open(path, os.O_RDONLY)
    return np.frombuffer(mmap.mmap(handle, 0, access=mmap.ACCESS_READ), np.uint16)


def readers(folder, tokens):
    store = open_store(folder / "hot")
    archive = open_store(folder / "archive")
    row = raw_map(folder / "raw")
    dataset = GPTDataset(store, seq_length=SEQ_LENGTH)
    megatron = GPTDataset(store, seq_length=SEQ_LENGTH, order="megatron")
    window = SEQ_LENGTH + 1
    count = (tokens - 1) // SEQ_LENGTH

    def positions(get):
        return count, lambda number: get(number * SEQ_LENGTH, number * SEQ_LENGTH + window)

    return {
        "raw memory map, copied": positions(lambda a, b: row[a:b].copy()),
        "raw memory map, copied again": positions(lambda a, b: row[a:b].copy()),
        "store.tokens, copied": positions(lambda a, b: store.tokens(a, b).copy()),
        "store.tokens, view": positions(store.tokens),
        "archive store.tokens": positions(archive.tokens),
        "GPTDataset.window, fast order": (len(dataset), dataset.window),
        "GPTDataset.window, Megatron's order": (len(megatron), megatron.window),
        "GPTDataset item, fast order": (len(dataset), dataset.__getitem__),
        "GPTDataset item, Megatron's order": (len(megatron), megatron.__getitem__),
    }


def block(get, numbers, seconds):
    """Reads a second, and CPU microseconds a read."""
    done, start, cpu = 0, time.perf_counter(), time.process_time()
    for number in numbers:
        get(number)
        done += 1
        if done % 8 == 0 and time.perf_counter() - start > seconds:
            break
    return done / (time.perf_counter() - start), (time.process_time() - cpu) / done * 1e6


def measure(folder, tokens, rounds, seconds):
    contestants = readers(folder, tokens)
    for count, get in contestants.values():  # checksums compared, pages in the cache
        for number in range(count):
            get(number)
    rates = {name: [] for name in contestants}
    cpu = {name: [] for name in contestants}
    for turn in range(rounds):
        for name, (count, get) in contestants.items():
            numbers = np.random.default_rng(turn).permutation(count).tolist()
            if name.startswith("GPTDataset"):  # its own order is random already
                numbers = list(range(count))
            rate, used = block(get, numbers, seconds)
            rates[name].append(rate)
            cpu[name].append(used)
    baseline = next(iter(contestants))
    for name in contestants:
        used = zip(cpu[baseline], cpu[name], strict=True)
        speed = zip(rates[name], rates[baseline], strict=True)
        print(
            f"{name:38s} {statistics.median(raw / ours for raw, ours in used):6.3f} of raw (CPU)"
            f" {statistics.median(ours / raw for ours, raw in speed):6.3f} (wall)"
            f" {min(cpu[name]):7.2f} us CPU"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[5_000_000, 20_000_000, 80_000_000]
    )
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=0.08)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    print(f"numpy {np.__version__}, Python {platform.python_version()}, {platform.machine()}")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for tokens in options.tokens:
            folder = Path(name) / str(tokens)
            write_store(folder / "hot", make_documents(tokens), vocab_size=VOCAB_SIZE)
            write_store(
                folder / "archive", make_documents(tokens), vocab_size=VOCAB_SIZE, layout="archive"
            )
            with (folder / "raw").open("wb") as file:
                for document in make_documents(tokens):
                    document.tofile(file)
            print(f"\n{tokens:,} tokens, {len(open_store(folder / 'hot')):,} documents")
            measure(folder, tokens, options.rounds, options.seconds)


if __name__ == "__main__":
    main()
