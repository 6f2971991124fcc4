"""Preprocess against the original's loop and peers, in MB of text per CPU-second, and peak memory.

    pip install datatrove datasets
    python benchmarks/preprocess.py [--sizes 1 4 16] [--rounds 3] [--document-mb 100]

A peer that is not installed is left out.

The original encodes one document at a time with offsets, as `tools/preprocess_data.py` does in
each worker. `original` is that loop in one process, `original-2` with its pool of two workers, both
without transformers around the tokenizer, which is in their favour. Where two cores are two threads
of one, two busy processes take more CPU-seconds for the same work; so the pool is what `ours-2` is
to be compared to. All write the same tokens. Each run is a process of its own; start-up (the same
run on one short document) is subtracted. Sizes are multiples of the sample corpus.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from mds_data.corpus import sample_corpus
from mds_data.tokenizers.train import train_tokenizer


def original(source: Path, folder: Path) -> None:
    """The loop of preprocess_data.py around the tokenizers library."""
    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    sizes = []
    with source.open(encoding="utf-8") as lines, (folder / "out.bin").open("wb") as output:
        for line in lines:
            ids = tokenizer.encode(json.loads(line)["text"]).ids
            ids.append(end)
            sizes.append(len(ids))
            output.write(np.array(ids, dtype=np.uint16).tobytes(order="C"))
    np.save(folder / "sizes.npy", np.array(sizes, np.int32))


def original_pool(source: Path, folder: Path) -> None:
    """The same with its pool: ``Pool.imap`` of 32 lines, ids sent back as a list."""
    import multiprocessing

    import numpy as np

    sizes = []
    with (
        multiprocessing.Pool(2, _load_original, (str(folder / "tokenizer.json"),)) as pool,
        source.open(encoding="utf-8") as lines,
        (folder / "out.bin").open("wb") as output,
    ):
        for ids, _ in pool.imap(_encode_original, lines, 32):
            sizes.append(len(ids))
            output.write(np.array(ids, dtype=np.uint16).tobytes(order="C"))
        pool.close()
        pool.join()
    np.save(folder / "sizes.npy", np.array(sizes, np.int32))


class _Original:
    """What a worker of the original's pool holds."""

    tokenizer: Any
    end: int


def _load_original(path: str) -> None:
    from tokenizers import Tokenizer

    _Original.tokenizer = Tokenizer.from_file(path)
    _Original.end = _Original.tokenizer.token_to_id("<|endoftext|>")


def _encode_original(line: str) -> tuple[list[int], int]:
    ids = _Original.tokenizer.encode(json.loads(line)["text"]).ids
    ids.append(_Original.end)
    return ids, len(line)


def ours(source: Path, folder: Path, *, workers: int) -> None:
    """The command line, as a user runs it."""
    from mds_data.cli import main

    arguments = ["preprocess", "--input", str(source), "--output", str(folder / "store")]
    arguments += ["--tokenizer", str(folder / "tokenizer.json"), "--append-eod", "--overwrite"]
    if main([*arguments, "--workers", str(workers)]):
        raise SystemExit(1)


def datatrove(source: Path, folder: Path) -> None:
    """The tokenizing pipeline of datatrove."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    inputs = folder / "inputs"
    shutil.rmtree(inputs, ignore_errors=True)
    inputs.mkdir()
    (inputs / "in.jsonl").symlink_to(source)
    tokenizer = DocumentTokenizer(
        str(folder / "datatrove"),
        str(folder / "tokenizer.json"),
        eos_token="<|endoftext|>",
        shuffle_documents=False,
    )
    logs = tempfile.mkdtemp(dir=folder)  # it passes over work that a log calls done
    LocalPipelineExecutor(
        [JsonlReader(str(inputs)), tokenizer], tasks=1, workers=1, logging_dir=logs
    ).run()


def hf_map(source: Path, folder: Path) -> None:
    """`datasets.map` with the tokenizers library, as fine-tuning scripts do it."""
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    cache = tempfile.mkdtemp(dir=folder)
    rows = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=cache)
    rows = rows.map(
        lambda batch: {"ids": [each.ids for each in tokenizer.encode_batch(batch["text"])]},
        batched=True,
        remove_columns=rows.column_names,
    )
    shutil.rmtree(folder / "hf", ignore_errors=True)
    rows.save_to_disk(str(folder / "hf"))


def contestant(name: str, source: Path, folder: Path) -> None:
    """Run one contestant in this process and print its CPU seconds and its tree's peak MB."""
    import os
    import resource

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    stop = threading.Event()
    peaks = [0.0]
    watcher = threading.Thread(target=watch, args=(stop, peaks), daemon=True)
    watcher.start()
    others = {"original": original, "original-2": original_pool, **PEERS}
    if name in others:
        others[name](source, folder)
    else:
        ours(source, folder, workers=int(name.removeprefix("ours-")))
    stop.set()
    watcher.join()
    # The server that forks our workers is waited for, so that their time counts as ours.
    forkserver._forkserver._stop()
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    print(json.dumps({"cpu": cpu, "peak": peaks[0]}))


PEERS = {"datatrove": datatrove, "hf-map": hf_map}
MODULES = {"datatrove": "datatrove", "hf-map": "datasets"}


def watch(stop: threading.Event, peaks: list[float]) -> None:
    """Keep the largest sum of proportional memory (PSS) of this process and its children, in MB."""
    me = Path("/proc/self/task").resolve().parent.name
    while not stop.wait(0.2):
        peaks[0] = max(peaks[0], sum(pss(pid) for pid in [me, *descendants(me)]))


def descendants(pid: str) -> list[str]:
    found: list[str] = []
    try:
        for task in (Path("/proc") / pid / "task").iterdir():
            for child in (task / "children").read_text().split():
                found += [child, *descendants(child)]
    except OSError:  # it ended meanwhile
        pass
    return found


def pss(pid: str) -> float:
    try:
        lines = (Path("/proc") / pid / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(float(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1000


def measure(name: str, source: Path, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--run", name, str(source), str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(source: Path, tiny: Path, folder: Path, *, rounds: int) -> None:
    peers = [name for name in PEERS if importlib.util.find_spec(MODULES[name]) is not None]
    names = ["original", "original-2", "ours-1", "ours-2", *peers]
    net: dict[str, list[float]] = {name: [] for name in names}
    gross: dict[str, list[float]] = {name: [] for name in names}
    peak: dict[str, float] = dict.fromkeys(names, 0.0)
    for _ in range(rounds):
        for name in names:  # alternating, so that other load meets all alike
            start = measure(name, tiny, folder)["cpu"]
            run = measure(name, source, folder)
            gross[name].append(run["cpu"])
            net[name].append(run["cpu"] - start)
            peak[name] = max(peak[name], run["peak"])
    size = source.stat().st_size / 1e6
    base = statistics.median(net["original"])
    for name in names:
        seconds = statistics.median(net[name])
        print(
            f"{size:7.1f} MB  {name:10s} {size / seconds:6.2f} MB/CPU-s net  "
            f"{size / statistics.median(gross[name]):6.2f} gross  {base / seconds:5.2f} x  "
            f"peak {peak[name]:5.0f} MB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--document-mb", type=int, default=0)
    parser.add_argument("--run", nargs=3)
    arguments = parser.parse_args()
    if arguments.run:
        name, source, folder = arguments.run
        contestant(name, Path(source), Path(folder))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = [document.text for document in sample_corpus()]
        (folder / "tokenizer.json").write_bytes(train_tokenizer(texts, vocab_size=8192).content)
        tiny = folder / "tiny.jsonl"
        tiny.write_text('{"text": "the"}\n')
        for size in arguments.sizes:
            source = folder / "in.jsonl"
            with source.open("w") as file:
                for _ in range(size):
                    file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
            compare(source, tiny, folder, rounds=arguments.rounds)
        if arguments.document_mb:
            source = folder / "huge.jsonl"
            whole = "\n".join(texts) * (arguments.document_mb // 3 + 1)
            source.write_text(json.dumps({"text": whole[: arguments.document_mb * 10**6]}) + "\n")
            run = measure("ours-1", source, folder)
            print(f"one document of {arguments.document_mb} MB: peak {run['peak']:.0f} MB")


if __name__ == "__main__":
    main()
