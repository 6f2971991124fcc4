"""Where batches are worked on: in this process, in workers of this machine, or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from mds_data.preprocess.batches import Batch
from mds_data.preprocess.source import Mark, Source
from mds_data.preprocess.workers import check_guarded, map_in_order

__all__ = ["Engine", "LocalEngine"]


Item = TypeVar("Item")
Result = TypeVar("Result")


class Engine(Protocol):
    """Applies a function to every batch of a source, or every item; gives results in order."""

    def run(
        self, source: Source, *, make: Callable[[], Callable[[Batch], Any]]
    ) -> Iterator[tuple[Mark, Any]]:
        """Yield each batch's mark and ``make()(batch)``; ``make`` is called in each worker."""

    def map(
        self, items: Iterable[Item], *, make: Callable[[], Callable[[Item], Result]]
    ) -> Iterator[Result]:
        """Yield ``make()(item)``; ``make`` is called in each worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalEngine:
    """Worker processes of this machine; with one worker everything happens in this process."""

    workers: int = 1

    def __post_init__(self) -> None:
        check_guarded()
        if self.workers < 1:
            raise ValueError(f"workers ({self.workers}) must be at least 1.")

    def run(
        self, source: Source, *, make: Callable[[], Callable[[Batch], Any]]
    ) -> Iterator[tuple[Mark, Any]]:
        """Yield each batch's mark and ``make()(batch)``."""
        results = map_in_order(
            source, make=make, workers=self.workers, here=lambda batch: batch.is_long
        )
        for result in results:
            yield source.marks.popleft(), result

    def map(
        self, items: Iterable[Item], *, make: Callable[[], Callable[[Item], Result]]
    ) -> Iterator[Result]:
        """Yield ``make()(item)``."""
        return map_in_order(items, make=make, workers=self.workers)
