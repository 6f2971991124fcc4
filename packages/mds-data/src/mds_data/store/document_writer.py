"""Documents in, arrays out: the part that a new store and an appended one share."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mds_data.store.array_writer import ShardedArrayWriter
from mds_data.store.columns import check_labels, label_attributes
from mds_data.store.records import token_dtype

__all__ = ["DocumentWriter"]


class DocumentWriter:
    """Check documents and hand them to the arrays of a store.

    Args:
        arrays: ``tokens``, ``doc_start``, ``doc_length``, and what else the store keeps.
        vocab_size: Every id must be smaller.
    """

    def __init__(self, arrays: Mapping[str, ShardedArrayWriter], *, vocab_size: int) -> None:
        self._arrays = arrays
        self._vocab_size = vocab_size
        self._tokens = 0
        self._sentences = "sentence_length" in arrays
        self._columns = frozenset(
            name.partition("/")[2] for name in arrays if name.startswith("columns/")
        )

    @property
    def num_documents(self) -> int:
        """Documents of the store so far."""
        return self._arrays["doc_length"].length

    @property
    def num_tokens(self) -> int:
        """Tokens that this writer added."""
        return self._tokens

    def add(
        self,
        tokens: ArrayLike,
        *,
        sentence_lengths: Sequence[int] | None = None,
        columns: Mapping[str, Any] | None = None,
    ) -> None:
        """Add one document.

        Args:
            tokens: [tokens] ids, the end-of-document id included where the store has one.
            sentence_lengths: Tokens of each sentence; needed if the store keeps sentences.
            columns: The document's value in each column.
        """
        ids = np.asarray(tokens)
        self.add_many(
            ids,
            lengths=np.array([ids.size], np.int64),
            sentence_lengths=sentence_lengths,
            doc_sentences=None if sentence_lengths is None else [len(sentence_lengths)],
            columns={name: [value] for name, value in (columns or {}).items()},
        )

    def add_many(
        self,
        tokens: ArrayLike,
        *,
        lengths: ArrayLike,
        sentence_lengths: ArrayLike | None = None,
        doc_sentences: ArrayLike | None = None,
        columns: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        """Add many documents at once.

        Args:
            tokens: [sum of lengths] ids of all documents, one after the other.
            lengths: [documents] tokens of each document.
            sentence_lengths: [sentences] tokens of each sentence, in document order.
            doc_sentences: [documents] sentences of each document.
            columns: [documents] values by column.
        """
        ids = _checked_ids(tokens, self._vocab_size, first=self.num_documents)
        counts = np.asarray(lengths, np.int64).reshape(-1)
        if (counts < 0).any() or counts.sum() != len(ids):
            raise ValueError(f"lengths must be positive and add up to the {len(ids)} tokens given")
        self._check_extras(len(counts), columns or {}, sentence_lengths, doc_sentences)
        starts = self._arrays["tokens"].length + np.cumsum(counts) - counts
        self._arrays["tokens"].append(ids)
        self._arrays["doc_start"].append(starts)
        self._arrays["doc_length"].append(counts)
        for name, values in (columns or {}).items():
            self._arrays[f"columns/{name}"].append(np.asarray(values))
        if sentence_lengths is not None and doc_sentences is not None:
            self._arrays["sentence_length"].append(np.asarray(sentence_lengths, np.int32))
            self._arrays["doc_sentences"].append(np.asarray(doc_sentences, np.int32))
        self._tokens += len(ids)

    def add_labels(self, column: str, labels: Iterable[str]) -> None:
        """Keep texts that codes in a column stand for; see `mds_data.store.columns.text_code`."""
        attributes = self._arrays[f"columns/{column}"].attributes
        known = set(attributes.get("labels", ()))
        if not known.issuperset(labels):
            known.update(labels)
            check_labels(column, known)
            attributes.update(label_attributes(known))

    def _check_extras(
        self,
        documents: int,
        columns: Mapping[str, ArrayLike],
        sentence_lengths: ArrayLike | None,
        doc_sentences: ArrayLike | None,
    ) -> None:
        if columns.keys() != self._columns:
            raise ValueError(
                f"the store's columns are {sorted(self._columns)}, but {sorted(columns)} were given"
            )
        for name, values in columns.items():
            if len(np.asarray(values)) != documents:
                raise ValueError(
                    f"column {name!r} needs one value for each of {documents} documents"
                )
        given = sentence_lengths is not None and doc_sentences is not None
        if given != self._sentences:
            raise ValueError(
                "sentence lengths must be given exactly if the store was opened with sentences=True"
            )
        if given and np.sum(np.asarray(doc_sentences)) != len(np.asarray(sentence_lengths)):
            raise ValueError("doc_sentences must add up to the number of sentence lengths")


def _checked_ids(tokens: ArrayLike, vocab_size: int, *, first: int) -> NDArray[Any]:
    ids = np.asarray(tokens)
    if ids.size == 0:
        return np.zeros(0, token_dtype(vocab_size))
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"document {first}: tokens must be a row of whole numbers, not {ids.ndim}-d {ids.dtype}"
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        wrong = high if high >= vocab_size else low
        raise ValueError(
            f"documents from number {first} on hold the token {wrong}, outside the vocabulary of "
            f"{vocab_size}; give the tokenizer's true vocab_size"
        )
    return ids
