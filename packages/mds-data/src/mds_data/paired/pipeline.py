"""Write a store whose documents are made of parts: read, encode in workers, commit.

Each part is kept as one of the document's sentences: a pair has two, source and target; a
conversation alternates what is read and what is learned.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from mds_data.paired.drops import BROKEN, Drop, DropLog
from mds_data.paired.encode import EncodedParts
from mds_data.preprocess.inputs import InputError
from mds_data.preprocess.pipeline import (
    check_free,
    settle_output,
    stored_tokenizer,
    writing_path,
)
from mds_data.preprocess.report import InputRecord
from mds_data.preprocess.workers import check_guarded, map_in_order
from mds_data.privacy.documents import DocumentRedactor, RedactionTally
from mds_data.privacy.rules import RedactionRules
from mds_data.provenance.source_facts import SourceRules
from mds_data.store.folder import is_store
from mds_data.store.schema import Layout, package_version
from mds_data.store.split import split_ranges
from mds_data.store.writer import StoreWriter
from mds_data.tokenizers import Tokenizer, TokenizerSpec, load_tokenizer

__all__ = ["PartsConfig", "PartsProgress", "PartsReport", "write_parts"]

_BATCH_RECORDS = 2048

Item = TypeVar("Item")
Record = TypeVar("Record", covariant=True)


Make: TypeAlias = Callable[
    [Tokenizer, DocumentRedactor | None], Callable[[Sequence[Item]], EncodedParts]
]


class _Source(Protocol[Record]):
    """Raw records, and how much of the files was read for them."""

    done: list[InputRecord]
    bytes_total: int

    @property
    def bytes_read(self) -> int: ...

    @property
    def names(self) -> str: ...

    def __iter__(self) -> Iterator[Record]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PartsConfig:
    """How a store of parts is written, whatever the parts are."""

    output: Path
    tokenizer: TokenizerSpec
    split: str | None = None
    layout: Layout = "hot"
    workers: int = 1
    on_error: Literal["fail", "skip"] = "fail"
    overwrite: bool = False
    redact: RedactionRules | None = None
    """Replace private data before anything is encoded."""
    sources: SourceRules = field(default_factory=SourceRules)
    """Licence, address and terms of the inputs."""

    def __post_init__(self) -> None:
        check_guarded()
        if self.workers < 1:
            raise ValueError(f"workers ({self.workers}) must be at least 1.")
        split_ranges(self.split)


@dataclass(frozen=True, slots=True)
class PartsProgress:
    """How far a run is."""

    bytes_done: int
    bytes_total: int
    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PartsReport:
    """The result of one run."""

    output: Path
    documents: int
    tokens: int
    drops: DropLog
    inputs: tuple[InputRecord, ...]
    redacted: RedactionTally | None = None
    """What was replaced in the texts; None if nothing was looked for."""


def write_parts(
    source: _Source[Item],
    *,
    config: PartsConfig,
    make: Make[Item],
    name: str,
    arguments: Mapping[str, Any],
    on_progress: Callable[[PartsProgress], None] | None = None,
    on_drops: Callable[[Sequence[Drop]], None] | None = None,
) -> PartsReport:
    """Encode all records of a source into one store.

    Args:
        source: Gives the records.
        config: Where and how to write.
        make: Builds the encoder from a tokenizer, and a redactor if texts are to be redacted;
            called once in each worker, so picklable.
        name: Of the transform in the manifest.
        arguments: Of the transform in the manifest.
        on_progress: Called after each batch.
        on_drops: Called with what each batch dropped, in the order of the input.

    Raises:
        InputError: A record is broken and ``on_error`` is ``fail``, or none is left.
        StoreError: The output exists.
    """
    check_free(config.output, overwrite=config.overwrite)
    log, redacted = DropLog(), RedactionTally()
    with _open_writer(config, load_tokenizer(config.tokenizer)) as writer:
        encoder = partial(_make_encoder, config, make)
        for batch in map_in_order(_batches(source), make=encoder, workers=config.workers):
            _take(batch, writer=writer, config=config, log=log, on_drops=on_drops)
            redacted.add(batch.redacted)
            if on_progress is not None:
                on_progress(_progress(source, writer))
        _check_not_empty(writer, source.names, log)
        transform = _transform(name, config, arguments) | {"report": log.as_json()}
        if config.redact is not None:
            transform["redaction"] = redacted.as_json()
        inputs = _input_facts(source.done, config)
        writer.commit(provenance={"inputs": inputs, "transforms": [transform]})
    settle_output(config.output, overwrite=config.overwrite)
    return PartsReport(
        output=config.output,
        documents=writer.num_documents,
        tokens=writer.num_tokens,
        drops=log,
        inputs=tuple(source.done),
        redacted=None if config.redact is None else redacted,
    )


def _progress(source: _Source[Any], writer: StoreWriter) -> PartsProgress:
    return PartsProgress(
        source.bytes_read, source.bytes_total, writer.num_documents, writer.num_tokens
    )


def _transform(name: str, config: PartsConfig, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What the manifest says of how the records became a store."""
    settings = {
        "split": config.split,
        "layout": config.layout,
        "on_error": config.on_error,
        "tokenizer": config.tokenizer.kind,
        "redact": None if config.redact is None else dict(config.redact.described()),
    }
    arguments = {**arguments, **settings}
    return {"name": name, "version": package_version(), "arguments": arguments}


def _input_facts(records: Sequence[InputRecord], config: PartsConfig) -> list[dict[str, Any]]:
    """What the manifest says of each input, licences and terms included."""
    paths = [Path(record.path) for record in records]
    config.sources.check_used(paths)
    return [
        asdict(record) | config.sources.facts(path)
        for record, path in zip(records, paths, strict=True)
    ]


def _make_encoder(
    config: PartsConfig, make: Make[Item]
) -> Callable[[Sequence[Item]], EncodedParts]:
    redactor = None if config.redact is None else DocumentRedactor(config.redact)
    return make(load_tokenizer(config.tokenizer), redactor)


def _batches(records: Iterable[Item]) -> Iterator[list[Item]]:
    waiting: list[Item] = []
    for record in records:
        waiting.append(record)
        if len(waiting) == _BATCH_RECORDS:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


def _open_writer(config: PartsConfig, tokenizer: Tokenizer) -> StoreWriter:
    target = writing_path(config.output, overwrite=config.overwrite)
    if target != config.output and is_store(target):
        shutil.rmtree(target)  # left by a run that was killed between its commit and the swap
    return StoreWriter(
        target,
        vocab_size=tokenizer.vocab_size,
        eod_id=None,
        layout=config.layout,
        split=config.split,
        tokenizer=stored_tokenizer(tokenizer),
        sentences=True,
    )


def _take(
    batch: EncodedParts,
    *,
    writer: StoreWriter,
    config: PartsConfig,
    log: DropLog,
    on_drops: Callable[[Sequence[Drop]], None] | None,
) -> None:
    if on_drops is not None and batch.drops:
        on_drops(batch.drops)
    if config.on_error == "fail":
        first = next((drop for drop in batch.drops if drop.kind == BROKEN), None)
        if first is not None:
            raise InputError(
                f"{first}. Mend the line, or leave such records out by --on-error skip."
            )
    log.add(batch.drops)
    writer.add_many(
        batch.tokens,
        lengths=batch.lengths,
        sentence_lengths=batch.part_lengths,
        doc_sentences=batch.doc_parts,
    )


def _check_not_empty(writer: StoreWriter, names: str, log: DropLog) -> None:
    if writer.num_documents == 0:
        reasons = "; ".join(log.sentences()) or "the input holds no line"
        raise InputError(f"{names}: nothing is left, so no store was written: {reasons}.")
