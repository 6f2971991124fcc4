"""The archive layout on real text: bytes beside Megatron's, and whole items beside Megatron's.

    pip install megatron-core
    python benchmarks/archive.py [--megabytes 3 9 18] [--rounds 15] [--tokenizer FILE]

The text is the sample corpus (3 MB of Python's documentation), and beyond it the sources of
Python's library. Without ``--tokenizer`` it is tokenised by a byte-level BPE that was trained on
the documentation: the closer a tokenizer fits the text, the less is left to gain, so this is the
worst case. An item is what a trainer takes: tokens, labels, loss mask, position ids.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from peers import SEQ_LENGTH, available, megatron_item, report, timed, versions

from mds_data import GPTDataset, open_store, write_store
from mds_data.corpus import sample_corpus
from mds_data.tokenizers.load import load_tokenizer, spec_of_file
from mds_data.tokenizers.train import train_tokenizer

_VOCAB_SIZE = 16_384
_END = 0
_LARGEST_UINT16 = 65_500
"""Megatron keeps ids of smaller vocabularies in 2 bytes, others in 4."""


class TextCorpus:
    """Documents of real text as ids."""

    def __init__(self, folder: Path, documents: list[list[int]], *, vocab_size: int) -> None:
        self.folder = folder
        self.lengths = np.array([len(ids) for ids in documents], np.int64)
        self.itemsize = 2 if vocab_size < _LARGEST_UINT16 else 4
        dtype = np.uint16 if self.itemsize == 2 else np.int32
        self.row = np.concatenate([np.array(ids, dtype) for ids in documents])
        self.samples = (len(self.row) - 1) // SEQ_LENGTH
        for layout in ("hot", "archive"):
            write_store(
                folder / layout,
                documents,
                vocab_size=vocab_size,
                eod_id=_END,
                layout=layout,
            )

    def size(self, layout: str) -> int:
        """Bytes of a store's tokens."""
        return sum(path.stat().st_size for path in (self.folder / layout / "tokens").rglob("*"))


def item_of(layout: str, *, forgets: bool = False, **options: Any) -> Any:
    def build(corpus: TextCorpus) -> Any:
        store = open_store(corpus.folder / layout)
        if forgets:  # as if the corpus were far larger than the memory for decompressed chunks
            store.parts[0].tokens._most_views = 1
        dataset = GPTDataset(store, seq_length=SEQ_LENGTH, **options)
        return len(dataset), dataset.__getitem__

    return build


ITEMS = {
    "Megatron item": megatron_item,
    "archive item, Megatron's order": item_of("archive", order="megatron"),
    "archive item, fast order": item_of("archive"),
    "the same, each chunk anew": item_of("archive", order="megatron", forgets=True),
    "fast order, each chunk anew": item_of("archive", forgets=True),
    "hot item, Megatron's order": item_of("hot", order="megatron"),
}


def texts(megabytes: float) -> Iterator[str]:
    """Documentation, then sources, each once, until there is enough."""
    library = Path(sysconfig.get_path("stdlib"))
    sources = [
        path
        for path in sorted(library.rglob("*.py"))
        if not {"site-packages", "test", "tests"} & set(path.parts)
    ]
    size = 0
    for text in chain(
        (document.text for document in sample_corpus()),
        (path.read_text("utf-8", "replace") for path in sources),
    ):
        if size > megabytes * 1e6:
            return
        size += len(text)
        yield text


def trained(folder: Path) -> Path:
    """The file of a tokenizer that was made for the documentation."""
    words = [document.text for document in sample_corpus()]
    path = folder / "tokenizer.json"
    path.write_bytes(train_tokenizer(words, vocab_size=_VOCAB_SIZE).content)
    return path


def compare(corpus: TextCorpus, *, rounds: int) -> None:
    theirs, archive = len(corpus.row) * corpus.itemsize, corpus.size("archive")
    print(
        f"{len(corpus.row):,} tokens in {len(corpus.lengths):,} documents: "
        f"Megatron {theirs / 1e6:.1f} MB, archive {archive / 1e6:.1f} MB, {archive / theirs:.3f}"
    )
    contestants = available(ITEMS, corpus)  # type: ignore[arg-type]
    used: dict[str, list[float]] = {name: [] for name in contestants}
    for count, get in contestants.values():
        timed(get, list(range(count)), 1.0)
    for turn in range(rounds):
        for name, (count, get) in contestants.items():
            numbers = np.random.default_rng(turn).permutation(count).tolist()
            used[name].append(timed(get, numbers, 0.1))
    report(used)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[3, 9, 18])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json or a SentencePiece model")
    options = parser.parse_args()
    print(versions())
    with tempfile.TemporaryDirectory() as name:
        path = options.tokenizer or trained(Path(name))
        tokenizer = load_tokenizer(spec_of_file(path))
        print(f"{tokenizer.vocab_size:,} different tokens")
        for megabytes in options.megabytes:
            encoded = tokenizer.encode_batch(list(texts(megabytes)))
            documents = [[*ids, _END] for ids in encoded]
            folder = Path(name) / f"{megabytes}"
            corpus = TextCorpus(folder, documents, vocab_size=tokenizer.vocab_size)
            compare(corpus, rounds=options.rounds)


if __name__ == "__main__":
    main()
