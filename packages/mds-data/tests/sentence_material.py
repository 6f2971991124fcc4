"""Stores with sentences, and the original's samples, for the tests of BERT and T5."""

from functools import cache
from pathlib import Path

import numpy as np
from store_material import golden_datasets

from mds_data import StoreWriter, TokenizerFile, Vocabulary, open_store
from mds_data.tokenizers.bert import load_bert_tokenizer

WORDS = [f"w{number}" for number in range(40)] + [f"##p{number}" for number in range(20)]


def small_vocabulary(folder, *, extra_ids=0):
    """A WordPiece tokenizer of 67 tokens and more."""
    path = Path(folder) / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    return load_bert_tokenizer(path, lower_case=True, extra_ids=extra_ids)


def sentence_store(folder, *, documents=60, seed=0, extra_ids=0, longest=14):
    """A store of 0 to 9 sentences a document, its tokenizer inside."""
    random = np.random.default_rng(seed)
    tokenizer = small_vocabulary(folder, extra_ids=extra_ids)
    file = TokenizerFile(kind=tokenizer.kind, content=tokenizer.file.content)
    path = Path(folder) / "sentences"
    with StoreWriter(
        path, vocab_size=tokenizer.vocab_size, sentences=True, tokenizer=file, split="80,20,0"
    ) as writer:
        for _ in range(documents):
            lengths = random.integers(1, longest, random.integers(0, 9)).tolist()
            ids = random.integers(5, 65, sum(lengths))
            writer.add(ids, sentence_lengths=lengths)
        writer.commit()
    return open_store(path)


@cache
def golden_vocabulary(extra_ids=0):
    path = golden_datasets() / "bertwp-vocab.txt"
    tokenizer = load_bert_tokenizer(path, lower_case=True, extra_ids=extra_ids)
    return Vocabulary.of_tokenizer(tokenizer)


def golden_samples(name):
    """The original's first samples, by the original's names."""
    with np.load(golden_datasets().parent / f"{name}_tp1_legacy_fp32" / "expected.npz") as file:
        return {key[7:]: file[key] for key in file.files if key.startswith("sample/")}
