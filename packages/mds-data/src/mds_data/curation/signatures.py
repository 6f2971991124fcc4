"""First pass of dedup: a signature of each text, kept in memory-sized rows on disk.

The tasks of a job array sign their files each by themselves; a signed part is a folder with the
rows, the place of each text, and a description by which the last step knows that all is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mds_data.curation.minhash import BandPlan, band_keys, plan_bands, shingles, signature
from mds_data.curation.records import Removal, text_records
from mds_data.curation.report import CurationReport
from mds_data.curation.run import CurationConfig, check_errors, curated_source
from mds_data.curation.spill import RowFile
from mds_data.errors import DataError
from mds_data.preprocess.batches import Batch
from mds_data.preprocess.engine import Engine
from mds_data.preprocess.inputs import Record
from mds_data.preprocess.records import RecordError
from mds_data.preprocess.report import InputRecord
from mds_data.preprocess.task import Task, parse_task, task_places

__all__ = [
    "PLACE",
    "DedupSettings",
    "Signatures",
    "SignedPart",
    "open_parts",
    "row_dtype",
    "sign_batches",
    "sign_task",
]

PLACE = np.dtype([("file", "<u4"), ("line", "<u8")])
"""Where a text stands."""
_DIGEST = 4
"""Numbers of 32 bits in the digest of an exact copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DedupSettings:
    """What counts as a copy."""

    mode: Literal["near", "exact"] = "near"
    """near: alike by at least ``threshold``; exact: the same but for white space at line ends."""
    threshold: float = 0.8
    """Jaccard index of the sets of word sequences, estimated."""
    shingle_words: int = 5
    """Words of a sequence."""
    permutations: int = 128
    """Places of a signature; the estimate errs by about 1 / sqrt(permutations)."""

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError(f"the threshold ({self.threshold}) must lie above 0 and up to 1.")
        if self.shingle_words < 1 or not 16 <= self.permutations <= 1024:
            raise ValueError("there must be at least 1 word and 16 to 1024 permutations.")


@dataclass(frozen=True, slots=True)
class Signatures:
    """What the first pass keeps of a batch."""

    lines: NDArray[np.uint64]
    """[documents] line of each."""
    rows: NDArray[np.uint32]
    """[documents, places]."""
    keys: NDArray[np.uint64]
    """[documents, bands]."""
    removals: list[Removal]


class _Signer:
    """First pass: the signature of each text."""

    def __init__(self, settings: DedupSettings, keys: tuple[str, ...]) -> None:
        self._settings = settings
        self._keys = keys
        self._plan = _plan(settings)

    def __call__(self, batch: Batch) -> Signatures:
        removals: list[Removal] = []

        def refuse(record: Record, error: RecordError) -> None:
            removals.append(Removal(batch.file, record.line, error.kind, str(error), record.data))

        lines, rows = [], []
        for record in text_records(batch, self._keys, refuse=refuse):
            lines.append(record.line)
            rows.append(self._row(record.text))
        found = np.asarray(rows, np.uint32).reshape(len(rows), _places(self._settings))
        keys = band_keys(found, self._plan)
        return Signatures(np.asarray(lines, np.uint64), found, keys, removals)

    def _row(self, text: str) -> NDArray[np.uint32]:
        settings = self._settings
        if settings.mode == "near":
            found = shingles(text, size=settings.shingle_words)
            return signature(found, count=settings.permutations)
        plain = "\n".join(line.rstrip() for line in text.strip().split("\n"))
        data = plain.encode("utf-8", "surrogatepass")
        return np.frombuffer(hashlib.blake2b(data, digest_size=4 * _DIGEST).digest(), "<u4")


def _plan(settings: DedupSettings) -> BandPlan:
    if settings.mode == "exact":
        return BandPlan(1, _DIGEST)
    return plan_bands(settings.permutations, threshold=settings.threshold)


def _places(settings: DedupSettings) -> int:
    return settings.permutations if settings.mode == "near" else _DIGEST


def row_dtype(settings: DedupSettings) -> np.dtype[Any]:
    """Return how one signature lies in a file."""
    return np.dtype(("<u4", _places(settings)))


def sign_batches(
    config: CurationConfig,
    settings: DedupSettings,
    *,
    engine: Engine,
    report: CurationReport,
    on_progress: Callable[[int, int, int], None] | None,
) -> Iterator[tuple[int, Signatures]]:
    """Yield the number of its file, and the signatures of each batch; the report takes the rest.

    Args:
        config: What to read.
        settings: What counts as a copy.
        engine: Where signatures are computed.
        report: Takes broken records, and the inputs at the end.
        on_progress: Called with bytes done, bytes in all and records.
    """
    source, count = curated_source(config), 0
    for mark, found in engine.run(source, make=partial(_Signer, settings, config.keys)):
        check_errors(found.removals, config=config)
        report.remove(found.removals)
        yield mark.file, found
        count += len(found.lines)
        if on_progress is not None:
            on_progress(source.bytes_at(mark), source.bytes_total, count)
    report.inputs = tuple(source.done)


_DESCRIPTION = "signed.json"
_FORMAT = "mds-signatures/1"
_BLOCK = 4096
"""Rows that are read at once."""


def sign_task(
    config: CurationConfig,
    settings: DedupSettings,
    *,
    engine: Engine,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> CurationReport:
    """Sign the files of one task into the folder ``config.output``, which appears whole.

    Raises:
        DataError: The folder is there already.
        InputError: A record is broken and ``on_error`` is ``fail``.
    """
    report = CurationReport(command="dedup", arguments=asdict(settings))
    root = config.output
    if root.exists() and not config.overwrite:
        raise DataError(f"{root} exists. Choose another output, or replace it by --overwrite.")
    if root.exists() and not (root / _DESCRIPTION).is_file():
        raise DataError(f"{root} exists and holds no signatures, so --overwrite leaves it alone.")
    partial_root = root.with_name(f"{root.name}.partial-{secrets.token_hex(8)}")
    partial_root.mkdir(parents=True)
    try:
        batches = sign_batches(
            config, settings, engine=engine, report=report, on_progress=on_progress
        )
        report.records = _write_rows(partial_root, batches, settings)
        _describe(partial_root, config, report)
        if root.exists():
            shutil.rmtree(root)
        partial_root.replace(root)
    finally:
        shutil.rmtree(partial_root, ignore_errors=True)
    return report


def _write_rows(
    folder: Path, batches: Iterator[tuple[int, Signatures]], settings: DedupSettings
) -> int:
    with ExitStack() as stack:
        rows = stack.enter_context(RowFile(folder / "signatures", row_dtype(settings)))
        places = stack.enter_context(RowFile(folder / "places", PLACE))
        for file, found in batches:
            rows.add(found.rows)
            places.add(places_of(file, found.lines))
        return rows.count


def places_of(file: int, lines: NDArray[np.uint64]) -> NDArray[Any]:
    """Return the place of each line, [n]."""
    places = np.empty(len(lines), PLACE)
    places["file"], places["line"] = file, lines
    return places


def _describe(folder: Path, config: CurationConfig, report: CurationReport) -> None:
    """Write, last of all, what the folder holds."""
    names = ("signatures", "places")
    for name in names:
        _sync(folder / name)
    description = {
        "format": _FORMAT,
        "task": str(config.task),
        "keys": list(config.keys),
        "files": {name: _digest(folder / name) for name in names},
        **report.as_json(),
    }
    path = folder / _DESCRIPTION
    path.write_text(json.dumps(description, indent=1, ensure_ascii=False), "utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class SignedPart:
    """What one task has signed."""

    path: Path
    task: Task
    settings: DedupSettings
    description: Mapping[str, Any]

    @property
    def inputs(self) -> list[InputRecord]:
        """The files that were read."""
        return [InputRecord(**each) for each in self.description["inputs"]]

    def blocks(self) -> Iterator[tuple[NDArray[np.uint32], NDArray[Any], NDArray[np.uint64]]]:
        """Yield rows, [n, places], the place of each, [n], and its keys, [n, bands].

        Raises:
            DataError: A file was cut or changed.
        """
        for name, digest in self.description["files"].items():
            if not (self.path / name).is_file() or _digest(self.path / name) != digest:
                raise DataError(f"{self.path / name}: was cut or changed; sign this task again")
        plan, dtype = _plan(self.settings), row_dtype(self.settings)
        with (self.path / "signatures").open("rb") as rows, (self.path / "places").open("rb") as at:
            while data := rows.read(_BLOCK * dtype.itemsize):
                found = np.frombuffer(data, dtype.base).reshape(-1, _places(self.settings))
                places = np.frombuffer(at.read(_BLOCK * PLACE.itemsize), PLACE)
                yield found, places, band_keys(found, plan)


def open_parts(
    folders: Sequence[Path], *, config: CurationConfig, settings: DedupSettings
) -> list[SignedPart]:
    """Return the parts of a job array, in the order of its tasks.

    Raises:
        DataError: One is missing, or they were signed from other files or with other settings.
    """
    found = [_open_part(folder) for folder in folders]
    places = task_places([part.task for part in found], names=folders)
    parts = [found[place] for place in places]
    for part in parts:
        if part.settings != settings or part.description["keys"] != list(config.keys):
            raise DataError(f"{part.path}: was signed with other settings; give the same ones.")
    signed = [(each.path, each.size) for part in parts for each in part.inputs]
    if signed != [(each.path.as_posix(), each.size) for each in curated_source(config).files]:
        raise DataError(
            f"{', '.join(map(str, folders))}: were signed from other files than --input gives."
        )
    return parts


def _open_part(path: Path) -> SignedPart:
    try:
        found = json.loads((path / _DESCRIPTION).read_bytes())
        if found["format"] != _FORMAT:
            raise DataError(f"{path}: is of format {found['format']!r}, not {_FORMAT}.")
        settings = DedupSettings(**found["arguments"])
        return SignedPart(path, parse_task(found["task"]), settings, found)
    except (OSError, KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError):
        raise DataError(
            f"{path}: holds no signatures of a task; write them by mds-data dedup --task I/N."
        ) from None
