"""From input files to token stores: read, encode in workers, write in the input's order, commit.

The bytes of a store depend on the inputs, the tokenizer and the arguments, never on the workers,
nor on how often a run was interrupted and went on.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mds_data.errors import StoreError
from mds_data.preprocess.batches import EncodedBatch, EncodedDocuments
from mds_data.preprocess.columns import ColumnSpec
from mds_data.preprocess.encode import Encoder
from mds_data.preprocess.engine import Engine, LocalEngine
from mds_data.preprocess.inputs import (
    InputError,
    InputFormat,
    TextUnit,
    find_inputs,
)
from mds_data.preprocess.job import Job, finished_report, kept_state, restart_point, settle_finished
from mds_data.preprocess.outputs import check_free, settle_output, writing_path
from mds_data.preprocess.problem_file import ProblemFile
from mds_data.preprocess.records import ERROR_KINDS
from mds_data.preprocess.report import PreprocessReport, ProblemLog
from mds_data.preprocess.sentences import split_sentences
from mds_data.preprocess.source import Mark, Source
from mds_data.preprocess.task import Task, task_files
from mds_data.privacy.documents import DocumentRedactor, RedactionTally
from mds_data.privacy.rules import RedactionRules
from mds_data.provenance.source_facts import SourceRules
from mds_data.store.folder import is_store
from mds_data.store.resume import find_checkpoint
from mds_data.store.schema import Layout, token_dtype
from mds_data.store.split import split_ranges
from mds_data.store.writer import StoreWriter, TokenizerFile
from mds_data.tokenizers import Tokenizer, TokenizerSpec, load_tokenizer
from mds_data.tokenizers.protocol import TokenizerError

__all__ = [
    "PreprocessConfig",
    "Progress",
    "SentenceConfig",
    "check_end",
    "check_free",
    "preprocess",
    "settle_output",
    "stored_tokenizer",
    "writing_path",
]


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
    columns: tuple[ColumnSpec, ...] = ()
    """What else of each record to keep beside its tokens."""
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
    resume: bool = False
    """Go on where an interrupted run with the same inputs and arguments was."""
    checkpoint_batches: int = 128
    """Batches (of about half a MB of text) after which the work so far is made durable."""
    task: Task | None = None
    """Work on one part of the files only; the stores of all tasks are merged later."""
    problems: Path | None = None
    """Write every problem as a line of JSON to this file."""
    redact: RedactionRules | None = None
    """Replace private data in texts and columns before anything is encoded."""
    sources: SourceRules = field(default_factory=SourceRules)
    """Licence, address and terms of the inputs."""

    def __post_init__(self) -> None:
        LocalEngine(workers=self.workers)
        if not self.outputs:
            raise ValueError("at least one JSON key is needed, such as 'text'.")
        if self.checkpoint_batches < 1:
            raise ValueError(f"checkpoint_batches ({self.checkpoint_batches}) must be at least 1.")
        split_ranges(self.split)
        names = [each.name for each in self.columns]
        if len(set(names)) < len(names):
            raise ValueError(f"the columns {', '.join(names)} have one name twice.")
        if self.redact is not None:
            self.redact.redactor()  # refuses a weak key before anything is read


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
    engine: Engine | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> PreprocessReport:
    """Tokenise input files into one store a JSON key.

    Args:
        config: What to do.
        engine: Where to encode; ``config.workers`` processes of this machine when left out.
        on_progress: Called after each batch.

    Raises:
        InputError: A record is broken and ``on_error`` is ``fail``, a file is damaged, or no
            document is left.
        TokenizerError: The tokenizer can't be loaded, or has no token to end a document with.
        StoreError: The output exists, or an interrupted run is in the way.
    """
    files = task_files(find_inputs(config.inputs, format=config.input_format), config.task)
    tokenizer = load_tokenizer(config.tokenizer)
    check_end(tokenizer, append_eod=config.append_eod)
    job = Job(
        files=files,
        arguments=_arguments(config),
        tokenizer=tokenizer.file.sha256,
        task=config.task,
        facts={file.path.as_posix(): config.sources.facts(file.path) for file in files},
    )
    if config.task is None:
        config.sources.check_used([file.path for file in files])
    found = {key: _target(path, job=job, config=config) for key, path in config.outputs.items()}
    targets = {key: path for key, path in found.items() if path is not None}
    if targets:
        _Run(config, job=job, tokenizer=tokenizer, targets=targets).run(
            engine or LocalEngine(workers=config.workers), on_progress=on_progress
        )
    for path in config.outputs.values():
        settle_output(path, overwrite=config.overwrite)
    return finished_report(config.outputs)


def _target(path: Path, *, job: Job, config: PreprocessConfig) -> Path | None:
    """Return where to write a store, or None if an interrupted run has finished it."""
    target = writing_path(path, overwrite=config.overwrite)
    if config.resume and settle_finished(path, target, job=job):
        return None
    check_free(path, overwrite=config.overwrite)
    if target != path and is_store(target):
        shutil.rmtree(target)  # Left by a run that was killed between its commit and the swap.
    if not config.resume and not config.overwrite and find_checkpoint(target) is not None:
        raise StoreError(
            f"{path}: an unfinished run is kept beside it. Go on with it by --resume, or throw it "
            f"away by --overwrite."
        )
    return target


class _Run:
    """One run over the input: the writers of all keys, and what was met on the way."""

    def __init__(
        self,
        config: PreprocessConfig,
        *,
        job: Job,
        tokenizer: Tokenizer,
        targets: Mapping[str, Path],
    ) -> None:
        self._config = config
        self._job = job
        self._tokenizer = tokenizer
        self._targets = targets
        self._writers: dict[str, StoreWriter] = {}
        self._behind: dict[str, Mark | None] = {}
        self._log = ProblemLog()
        self._redacted = RedactionTally()
        self._file: ProblemFile | None = None

    def run(self, engine: Engine, *, on_progress: Callable[[Progress], None] | None) -> None:
        with ExitStack() as stack:
            try:
                source = self._open(stack)
                self._encode(source, engine=engine, on_progress=on_progress)
                self._commit(source)
            except (ValueError, OSError, MemoryError, KeyboardInterrupt) as error:
                self._leave(error)
                raise

    def _open(self, stack: ExitStack) -> Source:
        """Open all writers, and the source where the least advanced of them was."""
        for key, path in self._targets.items():
            self._writers[key] = stack.enter_context(self._writer(path))
        restart = restart_point([writer.restored for writer in self._writers.values()])
        self._behind = {
            key: restart_point([writer.restored]).mark for key, writer in self._writers.items()
        }
        self._log = restart.log
        self._redacted = restart.redacted
        if self._config.problems is not None:
            self._file = stack.enter_context(
                ProblemFile(
                    self._config.problems,
                    overwrite=self._config.overwrite,
                    keep=restart.problem_bytes,
                )
            )
        return Source(
            self._job.files,
            text_unit=self._config.text_unit,
            members=[*self._config.outputs, *(each.member for each in self._config.columns)],
            start=restart.mark,
            done=self._job.checked(restart.done),
        )

    def _writer(self, path: Path) -> StoreWriter:
        config, tokenizer = self._config, self._tokenizer
        return StoreWriter(
            path,
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id if config.append_eod else None,
            layout=config.layout,
            split=config.split,
            tokenizer=stored_tokenizer(tokenizer),
            sentences=config.sentences is not None,
            columns={each.name: each.dtype for each in config.columns},
            job=self._job.as_json(),
            resume=config.resume,
        )

    def _encode(
        self, source: Source, *, engine: Engine, on_progress: Callable[[Progress], None] | None
    ) -> None:
        config = self._config
        results = engine.run(source, make=partial(_make_encoder, config))
        for done, (mark, batch) in enumerate(results, start=1):
            if self._file is not None:
                self._file.add(batch.problems)
            self._check(batch)
            self._redacted.add(batch.redacted)
            for key, writer in self._writers.items():
                behind = self._behind[key]
                if behind is None or mark > behind:
                    _write(writer, batch.documents[key], sentences=config.sentences is not None)
            batch.documents.clear()  # A huge one must not wait until the next one is encoded.
            if done % config.checkpoint_batches == 0:
                self._checkpoint(source, mark)
            if on_progress is not None:
                on_progress(_progress(source.bytes_at(mark), source, self._writers))

    def _check(self, batch: EncodedBatch) -> None:
        if self._config.on_error == "fail":
            first = next((p for p in batch.problems if p.kind in ERROR_KINDS), None)
            if first is not None:
                raise InputError(
                    f"{first}. Mend the line, or leave such records out by --on-error skip."
                )
        self._log.add(batch.problems)

    def _checkpoint(self, source: Source, mark: Mark) -> None:
        written = 0 if self._file is None else self._file.sync()
        state = kept_state(
            mark,
            self._job.kept(source.done[: mark.file]),
            log=self._log,
            redacted=self._redacted,
            problem_bytes=written,
        )
        for key, writer in self._writers.items():
            behind = self._behind[key]
            if behind is None or mark > behind:
                writer.checkpoint(state)

    def _commit(self, source: Source) -> None:
        empty = [key for key, writer in self._writers.items() if writer.num_documents == 0]
        if empty and self._config.task is None:
            reasons = "; ".join(self._log.sentences()) or "the input holds no line"
            raise InputError(
                f"no document is left for key {empty[0]!r} of {', '.join(self._config.inputs)}, so "
                f"no store was written: {reasons}."
            )
        if self._file is not None:
            self._file.publish()
        for writer in self._writers.values():
            writer.commit(
                provenance=self._job.provenance(source.done, log=self._log, redacted=self._redacted)
            )

    def _leave(self, error: BaseException) -> None:
        """Say what is kept, or remove what can't be of use."""
        if any(writer.resumable for writer in self._writers.values()):
            error.add_note("What was done is kept: go on by --resume, or drop it by --overwrite.")
        elif self._file is not None:
            self._file.discard()


def _make_encoder(config: PreprocessConfig) -> Encoder:
    tokenizer = load_tokenizer(config.tokenizer)
    return Encoder(
        tokenizer,
        keys=tuple(config.outputs),
        append_eod=config.append_eod,
        dtype=token_dtype(tokenizer.vocab_size),
        columns=config.columns,
        cut=partial(split_sentences, **asdict(config.sentences)) if config.sentences else None,
        redactor=None if config.redact is None else DocumentRedactor(config.redact),
    )


def check_end(tokenizer: Tokenizer, *, append_eod: bool) -> None:
    """Raise TokenizerError if documents shall end with a token that the tokenizer has not got."""
    if append_eod and tokenizer.eod_id is None:
        raise TokenizerError(
            f"{tokenizer.name} has no token that ends a document, so --append-eod can't be done; "
            f"name one by --eod-token."
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
        columns=documents.columns,
    )
    for name, labels in documents.labels.items():
        writer.add_labels(name, labels)


def _progress(done: int, source: Source, writers: Mapping[str, StoreWriter]) -> Progress:
    return Progress(
        bytes_done=done,
        bytes_total=source.bytes_total,
        documents=max(writer.num_documents for writer in writers.values()),
        tokens=sum(writer.num_tokens for writer in writers.values()),
    )


def _arguments(config: PreprocessConfig) -> dict[str, Any]:
    return {
        "json_keys": list(config.outputs),
        "append_eod": config.append_eod,
        "split": config.split,
        "layout": config.layout,
        "on_error": config.on_error,
        "text_unit": config.text_unit,
        "sentences": asdict(config.sentences) if config.sentences else None,
        "columns": [asdict(each) for each in config.columns],
        "redact": None if config.redact is None else dict(config.redact.described()),
        "tokenizer": config.tokenizer.kind,
        "allow_special_tokens": config.tokenizer.allow_special,
    }
