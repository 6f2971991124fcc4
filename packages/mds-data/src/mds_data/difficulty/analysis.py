"""Measure all samples or documents, by stretches that worker processes share.

Each stretch is a function of the store and its borders alone, so the result does not depend on the
number of workers, and stretches may as well be measured by other machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mds_data.difficulty.metrics import metric_named
from mds_data.errors import DataError
from mds_data.preprocess.engine import Engine, LocalEngine
from mds_data.store.selection import document_range
from mds_data.store.token_store import TokenStore

__all__ = ["Documents", "TokenRows", "analyze", "count_tokens", "measure"]

_STRETCH = 4096
_COUNTED_AT_ONCE = 64


class TokenRows(Protocol):
    """What can be measured: rows of ids by number. A `GPTDataset` is one."""

    store: TokenStore

    def __len__(self) -> int: ...

    def window(self, number: int, /) -> NDArray[Any]:
        """The ids of one row."""
        ...


class Documents:
    """The documents of a store, or of a part of its split, as rows."""

    def __init__(self, store: TokenStore, split: tuple[str, str] | str | None = None) -> None:
        self.store = store
        self._first, self._stop = document_range(store, split)

    def __len__(self) -> int:
        return self._stop - self._first

    def window(self, number: int) -> NDArray[Any]:
        """The ids of one document."""
        return self.store[self._first + number]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows ``start`` to ``stop``."""

    start: int
    stop: int


def count_tokens(rows: TokenRows, stretch: Stretch) -> NDArray[np.int64]:
    """[vocab_size] how often each id stands in a stretch of rows."""
    size = rows.store.vocab_size
    counts = np.zeros(size, np.int64)
    for start in range(stretch.start, stretch.stop, _COUNTED_AT_ONCE):
        numbers = range(start, min(start + _COUNTED_AT_ONCE, stretch.stop))
        ids = np.concatenate([rows.window(number) for number in numbers])
        counts += np.bincount(ids, minlength=size)
    return counts


def measure(
    rows: TokenRows,
    names: Sequence[str],
    counts: NDArray[np.int64] | None,
    stretch: Stretch,
) -> NDArray[np.float64]:
    """[measures, rows of the stretch] each measure of each row.

    Raises:
        DataError: A measure gave no number.
    """
    metrics = [metric_named(name, counts=counts) for name in names]
    values = np.empty((len(names), stretch.stop - stretch.start), np.float64)
    for place, number in enumerate(range(stretch.start, stretch.stop)):
        ids = rows.window(number)
        for kind, metric in enumerate(metrics):
            values[kind, place] = _number(metric(ids), name=names[kind], row=number)
    return values


def _number(value: object, *, name: str, row: int) -> float:
    if not isinstance(value, int | float | np.number) or not np.isfinite(value):
        raise DataError(f"the measure {name!r} gave {value!r} for row {row}, which is no number")
    return float(value)


def analyze(
    rows: TokenRows,
    names: Sequence[str],
    *,
    workers: int = 1,
    engine: Engine | None = None,
    part: range | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, NDArray[np.float64]]:
    """Measure every row.

    Args:
        rows: A `GPTDataset` (its samples) or `Documents`.
        names: Built-in measures (length, vocabulary-rarity, mean-rarity), or ``module:function``.
        workers: Processes that share the rows.
        engine: Where to measure; ``workers`` processes of this machine when left out.
        part: Measure these rows only, as one task of a job array. Rarity is that of all rows.
        on_progress: Called with the rows passed and their total; rarity passes them twice.

    Returns:
        [rows] values by name, [part] of a part.

    Raises:
        DataError: There is no such measure, or it gave no number.
    """
    rare = any(name.endswith("-rarity") for name in names)
    for name in names:  # refuses unknown ones before a row is read
        metric_named(name, counts=np.zeros(1, np.int64))
    engine = engine or LocalEngine(workers=workers)
    part = range(len(rows)) if part is None else part
    total = len(part) + (len(rows) if rare else 0)
    done = 0

    def passed(stretch: Stretch) -> None:
        nonlocal done
        done += stretch.stop - stretch.start
        if on_progress is not None:
            on_progress(done, total)

    counts = _counted(rows, engine=engine, passed=passed) if rare else None
    values: list[NDArray[np.float64]] = []
    stretches = list(_stretches(part))
    make = partial(_measurer, rows, tuple(names), counts)
    for stretch, measured in zip(stretches, engine.map(stretches, make=make), strict=True):
        values.append(measured)
        passed(stretch)
    joined = np.concatenate(values, axis=1) if values else np.empty((len(names), 0))
    return dict(zip(names, joined, strict=True))


def _counted(
    rows: TokenRows, *, engine: Engine, passed: Callable[[Stretch], None]
) -> NDArray[np.int64]:
    counts = np.zeros(rows.store.vocab_size, np.int64)
    stretches = list(_stretches(range(len(rows))))
    make = partial(_counter, rows)
    for stretch, found in zip(stretches, engine.map(stretches, make=make), strict=True):
        counts += found
        passed(stretch)
    return counts


def _measurer(
    rows: TokenRows, names: Sequence[str], counts: NDArray[np.int64] | None
) -> Callable[[Stretch], NDArray[np.float64]]:
    return partial(measure, rows, names, counts)


def _counter(rows: TokenRows) -> Callable[[Stretch], NDArray[np.int64]]:
    return partial(count_tokens, rows)


def _stretches(part: range) -> Iterator[Stretch]:
    for start in range(part.start, part.stop, _STRETCH):
        yield Stretch(start, min(start + _STRETCH, part.stop))
