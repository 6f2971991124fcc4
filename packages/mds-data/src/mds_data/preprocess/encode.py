"""Turn a batch of raw records into token ids. Runs in worker processes; touches no file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mds_data.preprocess.batches import Batch, EncodedBatch, EncodedDocuments
from mds_data.preprocess.columns import ColumnSpec, column_values
from mds_data.preprocess.inputs import Record
from mds_data.preprocess.long_encode import encode_long_record
from mds_data.preprocess.long_text import LONG, encode_long
from mds_data.preprocess.records import (
    Problem,
    ProblemKind,
    RecordError,
    json_object,
    member_sentences,
    member_text,
    notes,
    plain_text,
)
from mds_data.privacy.documents import DocumentRedactor
from mds_data.store.columns import text_code
from mds_data.tokenizers.protocol import TokenIds, Tokenizer

__all__ = ["Batch", "EncodedBatch", "EncodedDocuments", "Encoder"]


class Encoder:
    """Encodes batches with one tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        keys: Sequence[str],
        append_eod: bool,
        dtype: np.dtype[Any],
        cut: Callable[[str], list[str]] | None = None,
        columns: Sequence[ColumnSpec] = (),
        redactor: DocumentRedactor | None = None,
    ) -> None:
        """Encode with ``cut`` making sentences of a text, or documents as they are without it."""
        self._tokenizer = tokenizer
        self._redactor = redactor
        self._columns = tuple(columns)
        self._cut = cut
        self._keys = tuple(keys)
        self._end = [tokenizer.eod_id] if append_eod and tokenizer.eod_id is not None else []
        self._dtype = dtype

    def __call__(self, batch: Batch) -> EncodedBatch:
        """Encode one batch."""
        encoded = self._long(batch) if batch.is_long and self._cut is None else self._short(batch)
        return encoded if self._redactor is None else without_values(encoded, self._redactor)

    def _long(self, batch: Batch) -> EncodedBatch:
        return encode_long_record(
            batch,
            keys=self._keys,
            tokenizer=self._tokenizer,
            end=self._end,
            dtype=self._dtype,
            coded=self._coded,
            columns=self._columns,
            redactor=self._redactor,
        )

    def _short(self, batch: Batch) -> EncodedBatch:
        problems: list[Problem] = []
        texts: dict[str, list[_Text]] = {key: [] for key in self._keys}
        for record in batch.records:
            for key, text in self._read(record, batch=batch, problems=problems):
                texts[key].append(text)
        documents = {
            key: self._encode(texts[key], file=batch.file, problems=problems) for key in self._keys
        }
        return EncodedBatch(documents, sorted(problems, key=lambda problem: problem.line))

    def _read(
        self, record: Record, *, batch: Batch, problems: list[Problem]
    ) -> Iterable[tuple[str, _Text]]:
        """Return the texts of one record by key, and note what is wrong or odd about it."""

        def report(kind: ProblemKind, detail: str) -> None:
            problems.append(Problem(batch.file, record.line, kind, detail))

        if not record.data or record.data.isspace():
            report("empty", "an empty line")
            return
        try:
            members = None if batch.format == "text" else json_object(record.data)
            values = column_values(self._columns, members, file=batch.file, redactor=self._redactor)
        except RecordError as error:
            report(error.kind, str(error))
            return
        escaped = b"\\u" in record.data
        for key in self._keys:
            try:
                sentences = self._sentences(record, members, key=key, escaped=escaped)
            except RecordError as error:
                report(error.kind, str(error))
                continue
            for kind, detail in notes("".join(sentences)):
                report(kind, detail)
            if any(sentences):
                yield key, _Text(record.line, sentences, values)
            else:
                report("empty", "an empty document")

    def _sentences(
        self, record: Record, members: dict[str, object] | None, *, key: str, escaped: bool
    ) -> list[str]:
        if members is None:
            texts = [plain_text(record.data)]
        elif self._cut is not None and isinstance(members.get(key), list):
            return self._redacted(member_sentences(members, key=key, escaped=escaped))
        else:
            texts = [member_text(members, key=key, escaped=escaped)]
        texts = self._redacted(texts)  # before it is cut: a value may stand across sentences
        return texts if self._cut is None else self._cut(texts[0])

    def _redacted(self, texts: list[str]) -> list[str]:
        return texts if self._redactor is None else self._redactor.texts(texts)

    def _encode(
        self, texts: Sequence[_Text], *, file: str, problems: list[Problem]
    ) -> EncodedDocuments:
        tokens = _Tokens(self._dtype, end=self._end)
        values: list[Sequence[str | int | float | None]] = []
        pieces = [piece for text in texts for piece in text.sentences if len(piece) < LONG]
        short = iter(self._encode_short(pieces))
        for text in texts:
            results = [
                next(short) if len(piece) < LONG else self._encode_huge(piece)
                for piece in text.sentences
            ]
            ids = [result for result in results if not isinstance(result, str) and len(result)]
            refusal = next((result for result in results if isinstance(result, str)), None)
            if refusal is not None:
                problems.append(Problem(file, text.line, "refused", refusal))
            elif not ids:
                problems.append(Problem(file, text.line, "empty", "no token in this text"))
            else:
                tokens.add(ids)
                values.append(text.values)
        return tokens.documents(*self._coded(values))

    def _coded(
        self, values: Sequence[Sequence[str | int | float | None]]
    ) -> tuple[dict[str, NDArray[Any]], dict[str, set[str]]]:
        """Return the columns of documents, and the texts of categories."""
        columns: dict[str, NDArray[Any]] = {}
        labels: dict[str, set[str]] = {}
        for number, spec in enumerate(self._columns):
            column = [each[number] for each in values]
            if spec.kind == "category":
                labels[spec.name] = {text for text in column if isinstance(text, str)}
                codes = {text: text_code(text) for text in labels[spec.name]}
                column = [codes[text] if isinstance(text, str) else 0 for text in column]
            columns[spec.name] = np.asarray(column, spec.dtype)
        return columns, labels

    def _encode_short(self, texts: Sequence[str]) -> Sequence[TokenIds | str]:
        """Return the ids of each text, or the reason why there are none."""
        try:
            return self._tokenizer.encode_ids(texts)
        except ValueError:
            return [self._encode_one(text) for text in texts]  # One of them is to blame.

    def _encode_one(self, text: str) -> TokenIds | str:
        try:
            return self._tokenizer.encode_ids([text])[0]
        except ValueError as error:
            return str(error)

    def _encode_huge(self, text: str) -> NDArray[Any] | str:
        try:
            return encode_long(text, tokenizer=self._tokenizer, dtype=self._dtype)
        except ValueError as error:
            return str(error)


def without_values(batch: EncodedBatch, redactor: DocumentRedactor) -> EncodedBatch:
    """Return a batch with its tally, and problems that show nothing of what was replaced."""
    problems = [replace(each, detail=redactor.unseen(each.detail)) for each in batch.problems]
    return EncodedBatch(batch.documents, problems, redactor.take_tally())


@dataclass(frozen=True, slots=True)
class _Text:
    """One document to encode."""

    line: int
    sentences: list[str]
    """The text itself, alone, if sentences are not cut."""
    values: Sequence[str | int | float | None]
    """What the record has for each column."""


class _Tokens:
    """Collects ids of documents; lists in one list, which is cheaper than an array each."""

    def __init__(self, dtype: np.dtype[Any], *, end: list[int]) -> None:
        """Collect documents that end with the ids ``end``."""
        self._dtype = dtype
        self._end = end
        self._end_part = np.asarray(end, dtype)
        self._ids: list[int] = []
        self._parts: list[NDArray[Any]] = []
        self._lengths: list[int] = []
        self._sentence_lengths: list[int] = []
        self._doc_sentences: list[int] = []

    def add(self, sentences: Sequence[TokenIds]) -> None:
        """Add one document; its end belongs to its last sentence."""
        for ids in sentences:
            if isinstance(ids, list):
                self._ids += ids
            else:
                self._close_list()
                self._parts.append(ids)
            self._sentence_lengths.append(len(ids))
        if self._ids:
            self._ids += self._end
        else:
            self._parts.append(self._end_part)
        self._sentence_lengths[-1] += len(self._end)
        self._lengths.append(sum(self._sentence_lengths[-len(sentences) :]))
        self._doc_sentences.append(len(sentences))

    def documents(
        self, columns: dict[str, NDArray[Any]], labels: dict[str, set[str]]
    ) -> EncodedDocuments:
        self._close_list()
        tokens = np.empty(sum(map(len, self._parts)), self._dtype)
        if self._parts:
            # No id is too large: the type was chosen for the tokenizer's largest.
            np.concatenate(self._parts, out=tokens, casting="unsafe")
        return EncodedDocuments(
            tokens=tokens,
            lengths=np.asarray(self._lengths, np.int64),
            sentence_lengths=np.asarray(self._sentence_lengths, np.int32),
            doc_sentences=np.asarray(self._doc_sentences, np.int32),
            columns=columns,
            labels=labels,
        )

    def _close_list(self) -> None:
        if self._ids:
            self._parts.append(np.asarray(self._ids, self._dtype))
            self._ids = []
