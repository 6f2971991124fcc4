"""Turn one huge record into token ids, a piece at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mds_data.preprocess.batches import Batch, EncodedBatch, EncodedDocuments
from mds_data.preprocess.columns import ColumnSpec, column_values
from mds_data.preprocess.long_record import LongText, long_members
from mds_data.preprocess.long_text import encoded_pieces
from mds_data.preprocess.records import HUGE, Problem, RecordError, member_text
from mds_data.privacy.documents import DocumentRedactor
from mds_data.tokenizers.protocol import Tokenizer

__all__ = ["encode_long_record"]

Values = Sequence[str | int | float | None]
Coded = tuple[dict[str, NDArray[Any]], dict[str, set[str]]]


def encode_long_record(
    batch: Batch,
    *,
    keys: Sequence[str],
    tokenizer: Tokenizer,
    end: Sequence[int],
    dtype: np.dtype[Any],
    columns: Sequence[ColumnSpec],
    coded: Callable[[Sequence[Values]], Coded],
    redactor: DocumentRedactor | None = None,
) -> EncodedBatch:
    """Encode a batch that is one huge record; the record is let go.

    Args:
        batch: The record.
        keys: Members that hold text.
        tokenizer: Encodes it.
        end: Ids that end a document.
        dtype: Of the ids.
        columns: What else of the record is kept.
        coded: Makes columns of the values of documents.
        redactor: Takes private data out of texts and columns.
    """
    (record,) = batch.records
    problems: list[Problem] = []

    def report(error: RecordError) -> None:
        problems.append(Problem(batch.file, record.line, error.kind, str(error)))

    documents = {key: _documents(b"", dtype, coded([])) for key in keys}
    try:
        members, values = _opened(batch, columns=columns, redactor=redactor)
        for key in keys:
            try:
                text = _text(members, batch, key=key)
                text = text if redactor is None else redactor.pieces(text)
                ids, notes = _encoded(text, tokenizer=tokenizer, end=end, dtype=dtype)
            except RecordError as error:
                report(error)
                continue
            problems += [Problem(batch.file, record.line, note.kind, str(note)) for note in notes]
            documents[key] = _documents(ids, dtype, coded([values]))
    except RecordError as error:
        report(error)
    batch.records.clear()
    return EncodedBatch(documents, problems)


def _opened(
    batch: Batch, *, columns: Sequence[ColumnSpec], redactor: DocumentRedactor | None
) -> tuple[dict[str, Any] | None, Values]:
    """Return the members of the record (None for plain text), and its values for columns."""
    members = None if batch.format == "text" else long_members(batch.records[0].data)
    short = {} if members is None else dict(members)
    for spec in columns:
        value = short.get(spec.member)
        if isinstance(value, LongText):
            short[spec.member] = value.text()
    return members, column_values(columns, short, file=batch.file, redactor=redactor)


def _text(members: dict[str, Any] | None, batch: Batch, *, key: str) -> Iterator[str]:
    if members is None:
        data = batch.records[0].data
        return LongText(data, 0, len(data), escaped=False).pieces()
    value = members.get(key)
    if isinstance(value, LongText):
        return value.pieces()
    return iter([member_text(members, key=key, escaped=True)])


def _encoded(
    pieces: Iterator[str], *, tokenizer: Tokenizer, end: Sequence[int], dtype: np.dtype[Any]
) -> tuple[bytearray, list[RecordError]]:
    """Return the ids of a text as bytes, and what is odd about it.

    Raises:
        RecordError: The tokenizer refuses it, it is broken, or there is nothing in it.
    """
    ids = bytearray()  # grows in place, where joining arrays would need them twice
    characters = nuls = 0

    def counted() -> Iterator[str]:
        nonlocal characters, nuls
        for piece in pieces:
            characters += len(piece)
            nuls += piece.count("\0")
            yield piece

    try:
        for part in encoded_pieces(counted(), tokenizer=tokenizer):
            ids += np.asarray(part, dtype).tobytes()
    except RecordError:
        raise
    except ValueError as error:
        raise RecordError("refused", str(error)) from None
    if not ids:
        raise RecordError("empty", "no token in this text" if characters else "an empty document")
    ids += np.asarray(end, dtype).tobytes()
    notes = [RecordError("nul", f"{nuls} NUL characters, kept as text")] if nuls else []
    if characters > HUGE:
        notes.append(RecordError("huge", f"{characters:,} characters in one document"))
    return ids, notes


def _documents(ids: bytes | bytearray, dtype: np.dtype[Any], coded: Coded) -> EncodedDocuments:
    tokens = np.frombuffer(ids, dtype)
    count = 1 if ids else 0
    return EncodedDocuments(
        tokens=tokens,
        lengths=np.full(count, len(tokens), np.int64),
        sentence_lengths=np.full(count, len(tokens), np.int32),
        doc_sentences=np.ones(count, np.int32),
        columns=coded[0],
        labels=coded[1],
    )
