"""Read Megatron's .bin/.idx pairs in place: the mapped format and the older TNTIDX one.

The index is checked before anything is read through it: its counts against its size, its sizes and
pointers against the .bin file, its documents against its sequences.
"""

import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from mds_data.errors import IndexedDatasetError
from mds_data.store.folder import open_plain_file
from mds_data.store.records import Counts, Manifest, Producer

__all__ = [
    "AppendEodFault",
    "IndexedDataset",
    "find_append_eod_fault",
    "pair_prefix",
    "read_indexed_dataset",
]

_MAPPED_MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX\x00\x00"
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Codes of whole-number types; 6 and 7 are floats, which no token is."""
_CODES = {np.dtype(name): code for code, name in _DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class AppendEodFault:
    """What the original's ``--append-eod`` left out of an index: one token of every document."""

    eod_id: int
    documents: int


def dtype_code(dtype: np.dtype[Any]) -> int:
    """Megatron's number for a type of tokens."""
    return _CODES[dtype]


def pair_prefix(path: Path) -> Path | None:
    """Prefix of the pair that ``path`` means (a prefix, the .bin or the .idx), or None."""
    text = str(path)
    bare = text[:-4] if text.endswith((".bin", ".idx")) else text
    for prefix in (text, bare):
        if Path(prefix + ".idx").exists() or Path(prefix + ".bin").exists():
            return Path(prefix)
    return None


def _mapped_bytes(path: Path) -> NDArray[np.uint8]:
    handle, size = open_plain_file(path, follow_links=True)
    try:
        if size == 0:  # an empty file can't be mapped
            return np.zeros(0, np.uint8)
        return np.frombuffer(mmap.mmap(handle, 0, access=mmap.ACCESS_READ), np.uint8)
    finally:
        os.close(handle)


class _BinFile:
    """The tokens of a .bin file as one row."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        data = _mapped_bytes(path)
        self.size = len(data)
        self.dtype = dtype
        self._row = data[: self.size // dtype.itemsize * dtype.itemsize].view(dtype)
        self.length = len(self._row)
        self._path = path

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """The tokens from ``start`` to ``stop``, a view."""
        if not 0 <= start <= stop <= self.length:
            raise IndexError(f"{self._path}: can't read {start} to {stop} of {self.length} tokens")
        return self._row[start:stop]

    def close(self) -> None:
        """Let the file go."""
        self._row = self._row[:0]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Index:
    dtype: np.dtype[Any]
    sizes: NDArray[np.int64]
    """[sequences] tokens of each."""
    starts: NDArray[np.int64]
    """[sequences] position of the first token of each."""
    documents: NDArray[np.int64]
    """[documents + 1] first sequence of each document, and the number of sequences."""


class IndexedDataset:
    """One pair, seen as a part of a token store.

    Attributes:
        root: The pair's prefix.
        tokens: All tokens of the .bin file.
        sizes: [sequences] tokens of each sequence.
        starts: [sequences] position of each sequence's first token.
        documents: [documents + 1] first sequence of each document, and the number of sequences.
    """

    def __init__(self, prefix: Path) -> None:
        self.root = prefix
        name = Path(f"{prefix}.idx")
        index = _read_index(name)
        self.tokens = _BinFile(Path(f"{prefix}.bin"), index.dtype)
        self.sizes, self.starts, self.documents = index.sizes, index.starts, index.documents
        _check_index(index, self.tokens, name=str(name))
        self.num_documents = len(self.documents) - 1
        self.manifest = self._manifest()

    def _manifest(self) -> Manifest:
        narrow = self.tokens.dtype.kind == "u" and self.tokens.dtype.itemsize <= 2
        return Manifest(
            uuid=f"indexed-dataset-{len(self.sizes)}-{self.tokens.size}",
            vocab_size=2 ** (8 * self.tokens.dtype.itemsize) if narrow else 2**31 - 1,
            eod_id=None,
            dtype="uint16" if narrow else "int32",
            layout="hot",
            counts=Counts(
                documents=self.num_documents,
                tokens=int(self.sizes.sum()),
                sentences=len(self.sizes) if self.has_sentences else None,
            ),
            files={},
            producer=Producer(name="Megatron indexed dataset", version="1"),
        )

    @property
    def has_sentences(self) -> bool:
        """Whether a document may be other than one sequence."""
        return bool((np.diff(self.documents) != 1).any())

    def bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and length of each document."""
        if not self.has_sentences:
            return self.starts, self.sizes
        ends = np.concatenate([[0], np.cumsum(self.sizes)])
        length = ends[self.documents[1:]] - ends[self.documents[:-1]]
        starts = np.append(self.starts, self.tokens.length)
        return starts[self.documents[:-1]], length

    def document_array(self, name: str) -> NDArray[Any]:
        """Sentences of each document; a pair has no other columns."""
        if name != "doc_sentences":
            raise KeyError(name)
        return np.diff(self.documents).astype(np.int32)

    def sentence_length(self) -> NDArray[np.int32]:
        """[sequences] tokens of each sequence."""
        return self.sizes.astype(np.int32)


def read_indexed_dataset(prefix: str | os.PathLike[str]) -> IndexedDataset:
    """Open a pair by its prefix, its .bin or its .idx.

    Raises:
        FileNotFoundError: There is no such pair.
        IndexedDatasetError: The index is not what it claims to be.
    """
    found = pair_prefix(Path(prefix))
    if found is None:
        raise FileNotFoundError(f"{prefix}: there is no {prefix}.idx and no {prefix}.bin")
    for suffix in (".idx", ".bin"):
        if not Path(f"{found}{suffix}").exists():
            raise IndexedDatasetError(
                f"{found}{suffix}: is missing; a dataset needs both its .bin and its .idx file"
            )
    return IndexedDataset(found)


def _read_index(path: Path) -> _Index:
    data = _mapped_bytes(path)
    head = data[:9].tobytes()
    if head == _MAPPED_MAGIC:
        return _read_mapped_index(data, name=str(path))
    if head[:8] != _OLD_MAGIC:
        _fail(str(path), "does not begin like an index of Megatron; is it the .idx of a pair?")
    return _read_old_index(data, name=str(path))


def _fail(name: str, reason: str) -> NoReturn:
    raise IndexedDatasetError(f"{name}: {reason}")


def _dtype(code: int, *, name: str) -> np.dtype[Any]:
    if code not in _DTYPES:
        _fail(name, f"has the type code {code}, which is no whole-number type that tokens have")
    return np.dtype(_DTYPES[code])


def _read_mapped_index(data: NDArray[np.uint8], *, name: str) -> _Index:
    if len(data) < 34:
        _fail(name, f"has {len(data)} bytes, too few for its header; it was cut")
    version, code, sequences, documents = struct.unpack_from("<QBQQ", data[9:34].tobytes())
    if version != 1:
        _fail(name, f"has version {version}; only version 1 is known")
    dtype = _dtype(code, name=name)
    expected = 34 + 12 * sequences + 8 * documents
    if len(data) not in (expected, expected + sequences):  # newer ones append a mode a sequence
        _fail(
            name,
            f"has {len(data)} bytes, but {sequences} sequences and {documents} document borders "
            f"take {expected}; it was cut or is damaged",
        )
    sizes = data[34 : 34 + 4 * sequences].view("<i4").astype(np.int64)
    offset = 34 + 4 * sequences
    pointers = np.frombuffer(data[offset : offset + 8 * sequences].tobytes(), "<i8")
    offset += 8 * sequences
    borders = np.frombuffer(data[offset : offset + 8 * documents].tobytes(), "<i8")
    if (pointers % dtype.itemsize).any():
        number = int(np.flatnonzero(pointers % dtype.itemsize)[0])
        _fail(name, f"points sequence {number} between two tokens of {dtype.itemsize} bytes")
    return _Index(dtype=dtype, sizes=sizes, starts=pointers // dtype.itemsize, documents=borders)


def _read_old_index(data: NDArray[np.uint8], *, name: str) -> _Index:
    if len(data) < 56:
        _fail(name, f"has {len(data)} bytes, too few for its header; it was cut")
    version, code, width, sequences, numbers, documents = struct.unpack_from(
        "<QQQQQQ", data[8:56].tobytes()
    )
    if version != 1:
        _fail(name, f"has version {version}; only version 1 is known")
    dtype = _dtype(code, name=name)
    expected = 56 + 8 * (2 * (sequences + 1) + numbers + documents)
    if width != dtype.itemsize or len(data) != expected:
        _fail(
            name,
            f"has {len(data)} bytes and elements of {width} bytes, but its counts take {expected} "
            f"bytes and its type {dtype.itemsize}; it was cut or is damaged",
        )
    parts, start = [], 56
    for count in (sequences + 1, sequences + 1, numbers, documents):
        parts.append(np.frombuffer(data[start : start + 8 * count].tobytes(), "<i8"))
        start += 8 * count
    dimensions, offsets, sizes, borders = parts
    if numbers != sequences or (dimensions != np.arange(sequences + 1)).any():
        _fail(name, "holds sequences that are not one row of tokens each")
    if (np.diff(offsets) != sizes).any():
        _fail(name, "gives sequences other sizes than its offsets do; it is damaged")
    return _Index(dtype=dtype, sizes=sizes, starts=offsets[:-1], documents=borders)


def _check_index(index: _Index, tokens: _BinFile, *, name: str) -> None:
    sizes, starts, borders = index.sizes, index.starts, index.documents
    if rest := tokens.size % index.dtype.itemsize:
        _fail(
            name,
            f"has tokens of {index.dtype.itemsize} bytes, but the .bin file ends {rest} bytes into "
            f"one; the .bin file was cut or is another one",
        )
    if (sizes < 0).any():
        number = int(np.flatnonzero(sizes < 0)[0])
        _fail(name, f"gives sequence {number} the size {sizes[number]}")
    outside = (starts < 0) | (starts > tokens.length) | (sizes > tokens.length - starts)
    if outside.any():
        number = int(np.flatnonzero(outside)[0])
        _fail(
            name,
            f"puts sequence {number} at tokens {starts[number]} to {starts[number] + sizes[number]}"
            f", but the .bin file holds {tokens.length}; the .bin file was cut or is another one",
        )
    overlap = starts[1:] < starts[:-1] + sizes[:-1]
    if overlap.any():
        number = int(np.flatnonzero(overlap)[0]) + 1
        _fail(name, f"lets sequence {number} begin inside the one before; it is damaged")
    if not len(borders) or borders[0] != 0 or borders[-1] != len(sizes):
        _fail(
            name,
            f"has document borders that don't run from 0 to its {len(sizes)} sequences; "
            f"it was merged wrongly or is damaged, preprocess the data again",
        )
    if (np.diff(borders) < 0).any():
        number = int(np.flatnonzero(np.diff(borders) < 0)[0])
        _fail(name, f"lets document {number} end before it begins")
    inner = np.ones(max(len(sizes) - 1, 0), bool)
    inner[borders[(borders > 0) & (borders < len(sizes))] - 1] = False
    torn = inner & (starts[1:] != starts[:-1] + sizes[:-1])
    if torn.any():
        number = int(np.flatnonzero(torn)[0])
        _fail(name, f"leaves a gap after sequence {number} inside a document; it is damaged")


def find_append_eod_fault(pair: IndexedDataset) -> AppendEodFault | None:
    """Recognise the fault of the original's ``--append-eod``.

    Its preprocessing wrote an end-of-document token after each document, but counted the sizes
    before, so that every document after the first is read shifted. The sign: the .bin file holds
    exactly one token a document more than the index knows, and after the true documents the same
    id stands each time.
    """
    true_ends = _true_ends(pair)
    if true_ends is None:
        return None
    ids = np.array([pair.tokens.read(int(end), int(end) + 1)[0] for end in true_ends[:1000]])
    if (ids != ids[0]).any():
        return None
    rest = [pair.tokens.read(int(end), int(end) + 1)[0] for end in true_ends[1000:]]
    if rest and (np.array(rest) != ids[0]).any():
        return None
    return AppendEodFault(eod_id=int(ids[0]), documents=pair.num_documents)


def _true_ends(pair: IndexedDataset) -> NDArray[np.int64] | None:
    """Where each document's end token would lie, if the totals show the fault."""
    tokens = int(pair.sizes.sum())
    packed = (pair.starts == np.cumsum(pair.sizes) - pair.sizes).all()
    if not pair.num_documents or not packed or tokens + pair.num_documents != pair.tokens.length:
        return None
    _, lengths = pair.bounds()
    return np.cumsum(lengths + 1) - 1


def repaired_documents(pair: IndexedDataset) -> Sequence[tuple[int, int]]:
    """Start and end of each true document, its end token included, in a pair with the fault."""
    ends = _true_ends(pair)
    if ends is None:
        raise IndexedDatasetError(f"{pair.root}: does not have the --append-eod fault")
    starts = np.concatenate([[0], ends[:-1] + 1])
    return list(zip(starts.tolist(), (ends + 1).tolist(), strict=True))
