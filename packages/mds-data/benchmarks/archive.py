"""The archive layout on real text: bytes beside the hot layout, and whole items beside Megatron's.

    pip install megatron-core
    python benchmarks/archive.py [--megabytes 3 9 18] [--rounds 15]

The text is the sample corpus (3 MB of Python's documentation), and beyond it the sources of
Python's library, tokenised by a byte-level BPE that was trained on the documentation. How far ids
compress depends on how well the tokenizer fits the text: the better, the less is left to gain.
An item is what a trainer takes: tokens, labels, loss mask, position ids, in Megatron's order.
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
from mds_data.tokenizers.train import train_tokenizer

_VOCAB_SIZE = 16_384
_END = 0


class TextCorpus:
    """Documents of real text as ids."""

    def __init__(self, folder: Path, documents: list[list[int]]) -> None:
        self.folder = folder
        self.lengths = np.array([len(ids) for ids in documents], np.int64)
        self.row = np.concatenate([np.array(ids, np.uint16) for ids in documents])
        self.samples = (len(self.row) - 1) // SEQ_LENGTH
        for layout in ("hot", "archive"):
            write_store(
                folder / layout,
                documents,
                vocab_size=_VOCAB_SIZE,
                eod_id=_END,
                layout=layout,
            )

    def size(self, layout: str) -> int:
        """Bytes of a store's tokens."""
        return sum(path.stat().st_size for path in (self.folder / layout / "tokens").rglob("*"))


def item_of(layout: str, **options: Any) -> Any:
    def build(corpus: TextCorpus) -> Any:
        dataset = GPTDataset(open_store(corpus.folder / layout), seq_length=SEQ_LENGTH, **options)
        return len(dataset), dataset.__getitem__

    return build


ITEMS = {
    "Megatron item": megatron_item,
    "archive item, Megatron's order": item_of("archive", order="megatron"),
    "archive item, fast order": item_of("archive"),
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


def trained() -> Any:
    from tokenizers import Tokenizer

    words = [document.text for document in sample_corpus()]
    return Tokenizer.from_str(train_tokenizer(words, vocab_size=_VOCAB_SIZE).content.decode())


def compare(corpus: TextCorpus, *, rounds: int) -> None:
    hot, archive = corpus.size("hot"), corpus.size("archive")
    print(
        f"{len(corpus.row):,} tokens: {hot / 1e6:.1f} MB hot, {archive / 1e6:.1f} MB archive, "
        f"{archive / hot:.3f} of the bytes"
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
    options = parser.parse_args()
    print(versions())
    tokenizer = trained()
    for megabytes in options.megabytes:
        encoded = tokenizer.encode_batch_fast(list(texts(megabytes)))
        documents = [[*each.ids, _END] for each in encoded]
        with tempfile.TemporaryDirectory() as name:
            compare(TextCorpus(Path(name), documents), rounds=options.rounds)


if __name__ == "__main__":
    main()
