"""Random reads, whole batches and index builds: this package beside the libraries that do the same.

Every contestant reads the same corpus (Zipf ids, log-normal documents), gets short blocks in turn
over many rounds, and is compared to the baseline of its own round; figures are medians of ratios by
CPU time, the least disturbed number of a busy machine. A peer that is not installed is left out.

    pip install megatron-core litdata mosaicml-streaming zarr torch
    python peers.py reads   [--tokens 20000000] [--rounds 15]
    python peers.py batches [--workers 2]
    python peers.py index   [--documents 1000000]
"""

import argparse
import importlib.metadata
import mmap
import os
import platform
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mds_data import GPTDataset, ResumableSampler, open_store, write_store
from mds_data.datasets.megatron_order import MegatronOrder, sample_borders

SEQ_LENGTH = 2048
VOCAB_SIZE = 50257
EOD = 50256
BATCH = 8
Contestant = tuple[int, Callable[[int], Any]]
"""How many samples there are, and what reads one."""


class Corpus:
    """The same tokens as a raw file, as documents, and as windows of one sample each."""

    def __init__(self, folder: Path, tokens: int) -> None:
        self.folder = folder
        random = np.random.default_rng(0)
        lengths = np.maximum(1, random.lognormal(5.6, 1.1, tokens // 200).astype(np.int64))
        self.lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), tokens))]
        self.row = (random.zipf(1.15, int(self.lengths.sum())) % VOCAB_SIZE).astype(np.uint16)
        self.row.tofile(folder / "raw")
        self.samples = (len(self.row) - 1) // SEQ_LENGTH

    def documents(self) -> Iterator[np.ndarray]:
        return iter(np.split(self.row, np.cumsum(self.lengths)[:-1]))

    def windows(self) -> Iterator[np.ndarray]:
        for start in range(0, self.samples * SEQ_LENGTH, SEQ_LENGTH):
            yield self.row[start : start + SEQ_LENGTH + 1]


def memory_map(corpus: Corpus) -> Contestant:
    handle = os.open(corpus.folder / "raw", os.O_RDONLY)
    row = np.frombuffer(mmap.mmap(handle, 0, access=mmap.ACCESS_READ), np.uint16)
    size = SEQ_LENGTH
    return corpus.samples, lambda i: row[i * size : i * size + size + 1].copy()


def our_store(corpus: Corpus) -> Any:
    path = corpus.folder / "store"
    if not path.exists():
        write_store(path, corpus.documents(), vocab_size=VOCAB_SIZE, eod_id=EOD)
    return open_store(path)


def our_copy(corpus: Corpus) -> Contestant:
    read, size = our_store(corpus).tokens, SEQ_LENGTH
    return corpus.samples, lambda i: read(i * size, i * size + size + 1).copy()


def our_view(corpus: Corpus) -> Contestant:
    read, size = our_store(corpus).tokens, SEQ_LENGTH
    return corpus.samples, lambda i: read(i * size, i * size + size + 1)


def our_item(corpus: Corpus) -> Contestant:
    dataset = GPTDataset(our_store(corpus), seq_length=SEQ_LENGTH)
    return len(dataset), dataset.__getitem__


def our_megatron_item(corpus: Corpus) -> Contestant:
    dataset = GPTDataset(our_store(corpus), seq_length=SEQ_LENGTH, order="megatron")
    return len(dataset), dataset.__getitem__


def our_megatron_window(corpus: Corpus) -> Contestant:
    dataset = GPTDataset(our_store(corpus), seq_length=SEQ_LENGTH, order="megatron")
    return len(dataset), dataset.window


def megatron_dataset(corpus: Corpus) -> Any:
    from megatron.core.datasets.gpt_dataset import GPTDataset as Theirs
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset, _IndexWriter
    from megatron.core.datasets.utils import Split

    prefix = corpus.folder / "megatron" / "corpus"
    if not prefix.parent.exists():
        prefix.parent.mkdir()
        corpus.row.tofile(prefix.with_suffix(".bin"))
        with _IndexWriter(str(prefix.with_suffix(".idx")), corpus.row.dtype.type) as writer:
            count = len(corpus.lengths)
            writer.write(corpus.lengths.astype(np.int32).tolist(), None, list(range(count + 1)))
    tokenizer = types.SimpleNamespace(
        eod=EOD, pad=EOD, unique_identifiers={"name": "ids"}, vocab_size=VOCAB_SIZE
    )
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=SEQ_LENGTH,
        split="100,0,0",
        path_to_cache=str(prefix.parent / "cache"),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        allow_ambiguous_pad_tokens=True,
    )
    documents = np.arange(len(corpus.lengths), dtype=np.int32)
    source = IndexedDataset(str(prefix), mmap=True)
    return Theirs(source, str(prefix), documents, corpus.samples - 1, Split.train, config)


def megatron_item(corpus: Corpus) -> Contestant:
    dataset = megatron_dataset(corpus)
    return len(dataset), dataset.__getitem__


def megatron_gather(corpus: Corpus) -> Contestant:
    dataset = megatron_dataset(corpus)
    return len(dataset), lambda i: dataset._query_document_sample_shuffle_indices(i)[0]


def litdata_dataset(corpus: Corpus) -> Any:
    from litdata import StreamingDataset, TokensLoader

    folder = corpus.folder / "litdata"
    if not folder.exists():
        import torch
        from litdata.streaming.writer import BinaryWriter

        writer = BinaryWriter(str(folder), chunk_bytes="64MB", item_loader=TokensLoader())
        for number, document in enumerate(corpus.documents()):
            writer[number] = torch.from_numpy(document.astype(np.int32))
        writer.done()
        writer.merge()
    return StreamingDataset(str(folder), item_loader=TokensLoader(block_size=SEQ_LENGTH + 1))


def litdata_item(corpus: Corpus) -> Contestant:
    dataset = litdata_dataset(corpus)
    return len(dataset), lambda i: dataset[int(i)]


def streaming_dataset(corpus: Corpus) -> Any:
    without_torchvision()
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    folder = corpus.folder / "streaming"
    if not folder.exists():
        columns = {"tokens": f"ndarray:uint16:{SEQ_LENGTH + 1}"}
        with MDSWriter(out=str(folder), columns=columns, size_limit="64mb") as writer:
            for window in corpus.windows():
                writer.write({"tokens": window})
    clean_stale_shared_memory()
    return StreamingDataset(local=str(folder), shuffle=False, batch_size=BATCH)


def streaming_item(corpus: Corpus) -> Contestant:
    dataset = streaming_dataset(corpus)
    return dataset.num_samples, lambda i: dataset[int(i)]["tokens"]


def without_torchvision() -> None:
    """mosaicml-streaming imports torchvision for images only; its CUDA build fails on CPU torch."""
    if "torchvision" in sys.modules:
        return
    names = ("torchvision", "torchvision.datasets", "torchvision.transforms")
    for name in (*names, "torchvision.transforms.functional"):
        module: Any = types.ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
    sys.modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]


def zarr_item(corpus: Corpus) -> Contestant:
    import zarr

    our_store(corpus)
    array, size = zarr.open_group(corpus.folder / "store", mode="r")["tokens"], SEQ_LENGTH
    return corpus.samples, lambda i: array[i * size : i * size + size + 1]


READS = {
    "raw memory map, copied": memory_map,
    "mds-data store.tokens, copied": our_copy,
    "mds-data store.tokens, view": our_view,
    "mds-data item": our_item,
    "mds-data window, Megatron's order": our_megatron_window,
    "mds-data item, Megatron's order": our_megatron_item,
    "Megatron index and gather": megatron_gather,
    "Megatron item": megatron_item,
    "litdata": litdata_item,
    "mosaicml-streaming": streaming_item,
    "zarr-python on our store": zarr_item,
}


def available(table: dict[str, Callable[[Corpus], Any]], corpus: Corpus) -> dict[str, Any]:
    found = {}
    for name, build in table.items():
        try:
            found[name] = build(corpus)
        except ImportError as error:
            print(f"{name:36s} left out: {error}")
    return found


def timed(get: Callable[[int], Any], numbers: list[int], seconds: float) -> float:
    """CPU microseconds a sample, all threads of this process."""
    done, start, cpu = 0, time.perf_counter(), time.process_time()
    for number in numbers:
        get(number)
        done += 1
        if done % 4 == 0 and time.perf_counter() - start > seconds:
            break
    return (time.process_time() - cpu) / done * 1e6


def compare_reads(corpus: Corpus, *, rounds: int) -> None:
    contestants = available(READS, corpus)
    for count, get in contestants.values():  # pages in the cache, checksums compared
        timed(get, list(range(count)), 2.0)
    used: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds):
        for name, (count, get) in contestants.items():
            numbers = np.random.default_rng(turn).permutation(count).tolist()
            used[name].append(timed(get, numbers, 0.06))
    report(used)


def report(used: dict[str, list[float]]) -> None:
    baseline = next(iter(used))
    for name, values in used.items():
        ratio = statistics.median(b / v for b, v in zip(used[baseline], values, strict=True))
        spread = statistics.quantiles(values, n=4)
        print(
            f"{name:36s} {ratio:7.4f} of the baseline, {statistics.median(values):9.2f} us CPU "
            f"(quartiles {spread[0]:.2f} to {spread[2]:.2f})"
        )


class Rows:
    """Samples by number for a plain torch DataLoader."""

    def __init__(self, build: Callable[[Corpus], Contestant], corpus: Corpus) -> None:
        self.count, self.get = build(corpus)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        sample = self.get(number)
        return sample.astype(np.int64) if isinstance(sample, np.ndarray) else sample


def compare_batches(corpus: Corpus, *, workers: int, rounds: int) -> None:
    """Batches a second by the wall clock; each loader's start is not counted."""
    from torch.utils.data import DataLoader

    from mds_data.torch_dataset import data_loader, window_loader

    def ours(order: Any, loader: Any = data_loader) -> Callable[[], Iterator[Any]]:
        dataset = GPTDataset(our_store(corpus), seq_length=SEQ_LENGTH, order=order)
        sampler = ResumableSampler(len(dataset), global_batch_size=BATCH)
        return lambda: iter(loader(dataset, sampler, num_workers=workers))

    def plain(build: Callable[[Corpus], Contestant]) -> Callable[[], Iterator[Any]]:
        rows: Any = Rows(build, corpus)
        order = np.random.default_rng(0).permutation(len(rows)).tolist()
        return lambda: iter(DataLoader(rows, batch_size=BATCH, sampler=order, num_workers=workers))

    table = {
        "ids: raw memory map": lambda c: plain(memory_map),
        "ids: mds-data": lambda c: ours("fast", window_loader),
        "ids: litdata": lambda c: plain(litdata_item),
        "ids: mosaicml-streaming": lambda c: plain(streaming_item),
        "samples: mds-data": lambda c: ours("fast"),
        "samples: mds-data, Megatron's order": lambda c: ours("megatron"),
        "samples: Megatron": lambda c: plain(megatron_item),
    }
    loaders = available(table, corpus)
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(rounds):
        for name, make in loaders.items():
            batches = make()
            for _ in islice(batches, 20):
                pass
            start, count = time.perf_counter(), 0
            for _ in islice(batches, 800):  # far more than any loader reads ahead
                count += 1
            rates[name].append((time.perf_counter() - start) / count * 1e6)
            del batches
    for name, values in rates.items():
        median = statistics.median(values)
        print(f"{name:36s} {1e6 / median:8.0f} batches of {BATCH} a second (median)")


def compare_index(documents: int, *, epochs: int, rounds: int) -> None:
    """Our whole order (both shuffles included) beside the C++ helper's sample index alone."""
    random = np.random.default_rng(0)
    lengths = np.maximum(1, random.lognormal(4.0, 1.1, documents).astype(np.int64))
    tokens = int(lengths.sum())
    rows = np.tile(np.arange(documents, dtype=np.int32), epochs)
    np.random.RandomState(1).shuffle(rows)
    samples = (epochs * tokens - 1) // SEQ_LENGTH

    def ours() -> Any:
        return sample_borders(lengths, rows, samples=samples, seq_length=SEQ_LENGTH)

    def whole() -> Any:
        order = MegatronOrder(
            lengths,
            first=0,
            stop=documents,
            seq_length=SEQ_LENGTH,
            num_samples=samples,
            seed=1,
        )
        return order.sample_index

    table: dict[str, Callable[[], Any]] = {"mds-data, sample index": ours}
    try:
        from megatron.core.datasets import helpers

        sizes = lengths.astype(np.int32)
        flags = (True, True)  # drop the last partial sequence, add one extra token

        def theirs() -> Any:
            return helpers.build_sample_idx(sizes, rows, SEQ_LENGTH, epochs, tokens, *flags)

        print("equal to Megatron's:", bool((ours() == theirs()).all()))
        table = {
            "Megatron C++, sample index": theirs,
            **table,
        }
    except ImportError as error:
        print(f"Megatron left out: {error}")
    table["mds-data, shuffles and index"] = whole
    used: dict[str, list[float]] = {name: [] for name in table}
    for _ in range(rounds):
        for name, build in table.items():
            cpu = time.process_time()
            build()
            used[name].append((time.process_time() - cpu) * 1e6)
    report(used)


def versions() -> str:
    names = ("numpy", "torch", "megatron-core", "litdata", "mosaicml-streaming", "zarr")
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"Python {platform.python_version()}, {platform.machine()}, {', '.join(found)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["reads", "batches", "index"])
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    print(versions())
    if options.what == "index":
        compare_index(options.documents, epochs=options.epochs, rounds=options.rounds)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        corpus = Corpus(Path(name), options.tokens)
        print(f"{len(corpus.row):,} tokens, {len(corpus.lengths):,} documents")
        if options.what == "reads":
            compare_reads(corpus, rounds=options.rounds)
        else:
            compare_batches(corpus, workers=options.workers, rounds=options.rounds)


if __name__ == "__main__":
    main()
