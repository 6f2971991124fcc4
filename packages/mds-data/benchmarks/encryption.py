"""Encrypted stores: how fast they are made and read, against a plain one in each layout.

Readers take turns, many rounds, so that a busy machine disturbs all alike; the figures are medians.
"Seals" and "opens" are the cipher alone on one core: segments of 1 MiB, and those of a hot store
one after the other. Encrypting and decrypting also compute digests and write.

    python encryption.py [--tokens 30000000] [--rounds 9] [--folder FOLDER]
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
from random_read import VOCAB_SIZE, make_documents

from mds_data import KeySource, open_store, write_store
from mds_data.encryption.keys import new_identity
from mds_data.encryption.segments import SEGMENT_SIZE, FileKey, sealed_blocks
from mds_data.store.encrypt import decrypt_store, encrypt_store, rotate_key

WINDOW = 2049
READS = 400


def make(folder, tokens):
    key = folder / "key.txt"
    recipient = new_identity(key)
    source = KeySource(identity=key)
    megabytes = tokens * 2 / 1e6
    for layout in ("hot", "archive"):
        plain, sealed, opened = (folder / f"{kind}{layout}" for kind in ("", "sealed-", "opened-"))
        write_store(plain, make_documents(tokens), vocab_size=VOCAB_SIZE, layout=layout)
        steps = {
            "encrypt": partial(encrypt_store, plain, sealed, recipients=[recipient]),
            "decrypt": partial(decrypt_store, sealed, opened, key=source),
            "rotate": partial(rotate_key, sealed, old=source, recipients=[recipient]),
        }
        for what, act in steps.items():
            began, wall = time.process_time(), time.perf_counter()
            act()
            cpu, wall = time.process_time() - began, time.perf_counter() - wall
            rate = f"{megabytes / wall:8.0f} MB/s of tokens, {megabytes / cpu:6.0f} by time of CPU"
            print(f"{what:8} {layout:8} {wall * 1e3:8.1f} ms {'' if what == 'rotate' else rate}")
    return source


def measured(read, positions):
    began = time.process_time()
    for position in positions:
        read(position, position + WINDOW)
    return (time.process_time() - began) / len(positions)


def opening(folder, key):
    """Megabytes that one core opens in a second, segments alone."""
    store = open_store(folder / "sealed-hot", key=key)
    part = store.parts[0]
    began, size = time.process_time(), 0
    for number in range(part.tokens.layout.num_shards):
        file = part.folder.file(f"tokens/c/{number}")
        size += sum(len(file.segment(index)) for index in range(file.count))
    return size / 1e6 / (time.process_time() - began)


def sealing(_folder, _key):
    """Megabytes that one core seals in a second, segments of 1 MiB alone."""
    blocks = [os.urandom(SEGMENT_SIZE)] * 64
    source = FileKey(data_key=bytes(32), folder=bytes(16), path="x", file_id=bytes(16))
    pieces = iter(blocks)
    began = time.process_time()
    size = sum(
        len(block)
        for block in sealed_blocks(
            lambda _: next(pieces), size=64 * SEGMENT_SIZE, cut=SEGMENT_SIZE, key=source
        )
    )
    return size / 1e6 / (time.process_time() - began)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=30_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores")
        key = make(folder, arguments.tokens)
        for what, measure in (("seals", sealing), ("opens", opening)):
            rate = statistics.median(measure(folder, key) for _ in range(3))
            print(f"{what:8} {rate:8.0f} MB/s on one core")
        names = ["hot", "archive", "sealed-hot", "sealed-archive"]
        stores = {each: open_store(folder / each, key=key) for each in names}
        random = np.random.default_rng(1)
        for order in ("shuffled", "forward"):
            times = {each: [] for each in names}
            for turn in range(arguments.rounds):
                most = stores["hot"].num_positions - WINDOW
                positions = random.integers(0, most, READS)
                if order == "forward":
                    first = turn * READS * WINDOW % (most - READS * WINDOW)
                    positions = first + np.arange(READS) * WINDOW
                for each in names:
                    read = stores[each].tokens
                    times[each].append(measured(read, [int(p) for p in positions]))
            base = statistics.median(times["archive"])
            for each in names:
                median = statistics.median(times[each])
                print(f"{order:9} {each:15} {median * 1e6:8.1f} us a window, "
                      f"{base / median:6.2f} x the plain archive layout")  # fmt: skip


if __name__ == "__main__":
    main()
