"""The commands that make text and tokenizers: sample-corpus and train-tokenizer."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mds_data import corpus
from mds_data.commands.errors import UsageError
from mds_data.commands.progress import ProgressLine, megabytes
from mds_data.errors import DataError
from mds_data.preprocess.texts import InputTexts
from mds_data.tokenizers import train

__all__ = ["sample_corpus", "train_tokenizer"]


def sample_corpus(arguments: argparse.Namespace) -> int:
    """Write the sample corpus as JSON lines."""
    progress = ProgressLine(sys.stderr, label="sample-corpus", unit="files")
    count = 0
    with new_file(arguments.output, overwrite=arguments.overwrite) as output:
        for document in corpus.sample_corpus(seed=arguments.seed, on_progress=progress.update):
            count += 1
            line = json.dumps({"text": document.text, "source": document.source})
            output.write(line.encode() + b"\n")
    size = arguments.output.stat().st_size
    progress.finish(f"{count:,} documents, {megabytes(size)} MB in {arguments.output}")
    return 0


def train_tokenizer(arguments: argparse.Namespace) -> int:
    """Train a tokenizer and write its file."""
    suffix = ".model" if arguments.model == "unigram" else ".json"
    if arguments.output.suffix != suffix:
        raise UsageError(
            f"a {arguments.model} tokenizer is a {suffix} file; name the output so, "
            f"such as {arguments.output.with_suffix(suffix)}."
        )
    progress = ProgressLine(sys.stderr, label="train-tokenizer")
    texts = InputTexts(
        arguments.input,
        keys=arguments.json_keys,
        format=None if arguments.input_format == "auto" else arguments.input_format,
        text_unit=arguments.text_unit,
        on_error=arguments.on_error,
        on_progress=progress.update,
    )
    with new_file(arguments.output, overwrite=arguments.overwrite) as output:
        file = train.train_tokenizer(
            texts,
            vocab_size=arguments.vocab_size,
            model=arguments.model,
            special_tokens=arguments.special_tokens,
            min_frequency=arguments.min_frequency,
            lower_case=not arguments.cased,
        )
        output.write(file.content)
    for line in texts.problems.sentences():
        sys.stderr.write(f"train-tokenizer: {line}\n")
    progress.finish(
        f"{arguments.vocab_size:,} tokens ({arguments.model}) in {arguments.output}, "
        f"sha256 {file.sha256[:16]}"
    )
    return 0


@contextmanager
def new_file(path: Path, *, overwrite: bool) -> Iterator[BinaryIO]:
    """Open a file that gets its name only when it is whole and on the disk.

    Raises:
        DataError: The name is taken.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a file in it.")
    if path.exists() and not overwrite:
        raise DataError(f"{path} exists. Choose another output, or replace it by --overwrite.")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial-{secrets.token_hex(8)}")
    try:
        with partial.open("xb") as output:
            yield output
            output.flush()
            os.fsync(output.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
