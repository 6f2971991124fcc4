"""From input files to token stores: read, encode in workers, write in the input's order, commit.

The bytes of a store depend on the inputs, the tokenizer and the arguments, never on the workers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mds_data.errors import StoreError
from mds_data.preprocess.encode import Batch, EncodedBatch, EncodedDocuments, Encoder
from mds_data.preprocess.inputs import (
    InputError,
    InputFile,
    InputFormat,
    InputReader,
    Record,
    TextUnit,
    find_inputs,
)
from mds_data.preprocess.records import ERROR_KINDS
from mds_data.preprocess.report import InputRecord, PreprocessReport, ProblemLog
from mds_data.preprocess.sentences import split_sentences
from mds_data.preprocess.workers import map_in_order
from mds_data.store.folder import is_store
from mds_data.store.schema import Layout, package_version, token_dtype
from mds_data.store.split import split_ranges
from mds_data.store.writer import StoreWriter, TokenizerFile
from mds_data.tokenizers import Tokenizer, TokenizerSpec, load_tokenizer
from mds_data.tokenizers.protocol import TokenizerError

__all__ = ["PreprocessConfig", "Progress", "SentenceConfig", "preprocess"]

_BATCH_BYTES = 2**19
_BATCH_RECORDS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceConfig:
    """How texts are cut into sentences. Lists of sentences in the input are taken as they are."""

    keep_newlines: bool = False
    """Leave the white space after a sentence in it."""
    english: bool = True
    """Know English abbreviations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessConfig:
    """What to read, how to encode it, where to write."""

    inputs: tuple[str, ...]
    """Paths and globs."""
    outputs: Mapping[str, Path]
    """The store of each JSON key; text files have their text under every key."""
    tokenizer: TokenizerSpec
    append_eod: bool = False
    """End each document with the tokenizer's end-of-document id, counted in its length."""
    split: str | None = None
    """Megatron's split by documents, such as ``969,30,1``; recorded in the manifest."""
    sentences: SentenceConfig | None = None
    """Cut documents into sentences and keep their lengths (BERT, T5)."""
    layout: Layout = "hot"
    workers: int = 1
    on_error: Literal["fail", "skip"] = "fail"
    """What a broken record does. Empty documents are always left out and counted."""
    input_format: InputFormat | None = None
    text_unit: TextUnit = "document"
    """What one document of a text file is."""
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers ({self.workers}) must be at least 1.")
        if not self.outputs:
            raise ValueError("at least one JSON key is needed, such as 'text'.")
        split_ranges(self.split)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is."""

    bytes_done: int
    bytes_total: int
    documents: int
    tokens: int


def preprocess(
    config: PreprocessConfig,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    on_problems: Callable[[Sequence[Any]], None] | None = None,
) -> PreprocessReport:
    """Tokenise input files into one store a JSON key.

    Args:
        config: What to do.
        on_progress: Called after each batch.
        on_problems: Called with the problems of each batch, in the order of the input.

    Raises:
        InputError: A record is broken and ``on_error`` is ``fail``, a file is damaged, or no
            document is left.
        TokenizerError: The tokenizer can't be loaded, or has no token to end a document with.
        StoreError: The output exists.
    """
    for path in config.outputs.values():
        check_free(path, overwrite=config.overwrite)
    source = _Source(config)
    tokenizer = load_tokenizer(config.tokenizer)
    check_end(tokenizer, append_eod=config.append_eod)
    log = ProblemLog()
    with ExitStack() as stack:
        writers = {
            key: stack.enter_context(_open_writer(path, config=config, tokenizer=tokenizer))
            for key, path in config.outputs.items()
        }
        for batch in _encoded(source, config=config, tokenizer=tokenizer):
            if on_problems is not None and batch.problems:
                on_problems(batch.problems)
            _check(batch, config=config, log=log)
            for key, documents in batch.documents.items():
                _write(writers[key], documents, sentences=config.sentences is not None)
            if on_progress is not None:
                on_progress(_progress(source, writers))
        report = PreprocessReport(
            outputs=dict(config.outputs),
            documents={key: writer.num_documents for key, writer in writers.items()},
            tokens={key: writer.num_tokens for key, writer in writers.items()},
            inputs=tuple(source.done),
            problems=log,
        )
        _check_not_empty(report, config=config)
        for writer in writers.values():
            writer.commit(provenance=_provenance(report, config=config))
    for path in config.outputs.values():
        settle_output(path, overwrite=config.overwrite)
    return report


class _Source:
    """The input files as batches, and how much of them was read."""

    def __init__(self, config: PreprocessConfig) -> None:
        self._files = find_inputs(config.inputs, format=config.input_format)
        self._text_unit = config.text_unit
        self._current: InputReader | None = None
        self.done: list[InputRecord] = []
        self.bytes_total = sum(file.size for file in self._files)

    @property
    def bytes_read(self) -> int:
        before = sum(record.size for record in self.done)
        return before + (self._current.bytes_read if self._current is not None else 0)

    def batches(self) -> Iterator[Batch]:
        for file in self._files:
            self._current = InputReader(file, text_unit=self._text_unit)
            yield from _batches(file, self._current.records())
            self.done.append(
                InputRecord(
                    path=file.path.as_posix(),
                    size=self._current.bytes_read,
                    sha256=self._current.sha256,
                )
            )
            self._current = None


def _batches(file: InputFile, records: Iterator[Record]) -> Iterator[Batch]:
    name = file.path.as_posix()
    waiting: list[Record] = []
    size = 0
    for record in records:
        waiting.append(record)
        size += len(record.data)
        if size >= _BATCH_BYTES or len(waiting) >= _BATCH_RECORDS:
            yield Batch(name, file.format, waiting)
            waiting, size = [], 0
    if waiting:
        yield Batch(name, file.format, waiting)


def _encoded(
    source: _Source, *, config: PreprocessConfig, tokenizer: Tokenizer
) -> Iterator[EncodedBatch]:
    if config.workers == 1:
        encoder = _encoder(tokenizer, config=config)
        return map(encoder, source.batches())
    return map_in_order(
        source.batches(), make=partial(_make_encoder, config), workers=config.workers
    )


def _make_encoder(config: PreprocessConfig) -> Encoder:
    return _encoder(load_tokenizer(config.tokenizer), config=config)


def _encoder(tokenizer: Tokenizer, *, config: PreprocessConfig) -> Encoder:
    return Encoder(
        tokenizer,
        keys=tuple(config.outputs),
        append_eod=config.append_eod,
        dtype=token_dtype(tokenizer.vocab_size),
        cut=partial(split_sentences, **asdict(config.sentences)) if config.sentences else None,
    )


def check_end(tokenizer: Tokenizer, *, append_eod: bool) -> None:
    """Raise TokenizerError if documents shall end with a token that the tokenizer has not got."""
    if append_eod and tokenizer.eod_id is None:
        raise TokenizerError(
            f"{tokenizer.name} has no token that ends a document, so --append-eod can't be done; "
            f"name one by --eod-token."
        )


def check_free(path: Path, *, overwrite: bool) -> None:
    """Raise StoreError if an output's name is taken by something that must not be replaced."""
    if not path.exists() and not path.is_symlink():
        return
    if not overwrite:
        raise StoreError(f"{path} exists. Choose another output, or replace it by --overwrite.")
    if not is_store(path):
        raise StoreError(f"{path} exists and is no token store, so --overwrite leaves it alone.")


def writing_path(path: Path, *, overwrite: bool) -> Path:
    """Return where to write: at the output itself, or beside a store that will be replaced."""
    return path.with_name(f"{path.name}.replacement") if overwrite and path.exists() else path


def settle_output(path: Path, *, overwrite: bool) -> None:
    """Put a finished replacement in the place of the old store, which goes last."""
    replacement = path.with_name(f"{path.name}.replacement")
    if not (overwrite and is_store(replacement)):
        return
    old = path.with_name(f"{path.name}.replaced")
    path.replace(old)
    replacement.replace(path)
    shutil.rmtree(old)


def _open_writer(path: Path, *, config: PreprocessConfig, tokenizer: Tokenizer) -> StoreWriter:
    target = writing_path(path, overwrite=config.overwrite)
    if target != path and is_store(target):
        shutil.rmtree(target)  # Left by a run that was killed between its commit and the swap.
    return StoreWriter(
        target,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id if config.append_eod else None,
        layout=config.layout,
        split=config.split,
        tokenizer=stored_tokenizer(tokenizer),
        sentences=config.sentences is not None,
    )


def stored_tokenizer(tokenizer: Tokenizer) -> TokenizerFile:
    """Return the tokenizer's file as a store keeps it."""
    return TokenizerFile(
        kind=tokenizer.kind,
        content=tokenizer.file.content,
        file=tokenizer.file.name,
        name=tokenizer.name,
    )


def _write(writer: StoreWriter, documents: EncodedDocuments, *, sentences: bool) -> None:
    writer.add_many(
        documents.tokens,
        lengths=documents.lengths,
        sentence_lengths=documents.sentence_lengths if sentences else None,
        doc_sentences=documents.doc_sentences if sentences else None,
    )


def _check(batch: EncodedBatch, *, config: PreprocessConfig, log: ProblemLog) -> None:
    if config.on_error == "fail":
        first = next((p for p in batch.problems if p.kind in ERROR_KINDS), None)
        if first is not None:
            raise InputError(
                f"{first}. Mend the line, or leave such records out by --on-error skip."
            )
    log.add(batch.problems)


def _check_not_empty(report: PreprocessReport, *, config: PreprocessConfig) -> None:
    empty = [key for key, documents in report.documents.items() if documents == 0]
    if empty:
        reasons = "; ".join(report.problems.sentences()) or "the input holds no line"
        raise InputError(
            f"no document is left for key {empty[0]!r} of {', '.join(config.inputs)}, so no store "
            f"was written: {reasons}."
        )


def _progress(source: _Source, writers: dict[str, StoreWriter]) -> Progress:
    return Progress(
        bytes_done=source.bytes_read,
        bytes_total=source.bytes_total,
        documents=max(writer.num_documents for writer in writers.values()),
        tokens=sum(writer.num_tokens for writer in writers.values()),
    )


def _provenance(report: PreprocessReport, *, config: PreprocessConfig) -> dict[str, Any]:
    arguments = {
        "json_keys": list(config.outputs),
        "append_eod": config.append_eod,
        "split": config.split,
        "layout": config.layout,
        "on_error": config.on_error,
        "text_unit": config.text_unit,
        "sentences": asdict(config.sentences) if config.sentences else None,
        "tokenizer": config.tokenizer.kind,
        "allow_special_tokens": config.tokenizer.allow_special,
    }
    return {
        "inputs": [asdict(record) for record in report.inputs],
        "transforms": [
            {
                "name": "preprocess",
                "version": package_version(),
                "arguments": arguments,
                "report": report.problems.as_json(),
            }
        ],
    }
