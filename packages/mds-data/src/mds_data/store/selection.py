"""Which documents a dataset uses, and those documents as one row of tokens without gaps."""

from bisect import bisect_right
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mds_data.store.split import split_bounds
from mds_data.store.token_store import TokenStore

__all__ = ["DocumentRow", "document_range"]


def document_range(
    store: TokenStore, split: tuple[str, str] | str | None, *, count: int | None = None
) -> tuple[int, int]:
    """First document and end of a split.

    Args:
        store: The store.
        split: Megatron's split string and "train", "valid" or "test"; the name of a split that the
            manifest keeps; or None for all documents.
        count: What is split; the number of documents if None.
    """
    count = len(store) if count is None else count
    if split is None:
        return 0, count
    if isinstance(split, str):
        return _kept_range(store, split, count)
    text, name = split
    if name not in ("train", "valid", "test"):
        raise ValueError(f"a split has the parts train, valid and test, not {name!r}")
    bounds = split_bounds(text, documents=count)
    place = ("train", "valid", "test").index(name)
    return bounds[place], bounds[place + 1]


def _kept_range(store: TokenStore, name: str, count: int) -> tuple[int, int]:
    kept = store.manifest.split
    if kept is None:
        raise ValueError(
            f"{store.path}: keeps no split, so there is no part {name!r}; "
            f"give the shares too, such as split=('969,30,1', {name!r})"
        )
    if name not in kept:
        raise ValueError(f"{store.path}: has the parts {', '.join(kept)}, not {name!r}")
    start, stop = kept[name]
    return round(start * count), round(stop * count)


class DocumentRow:
    """The tokens of documents ``first`` to ``stop``, one after the other, gaps left out.

    Only the borders of gapless runs are kept, so a store without gaps costs nothing.
    """

    def __init__(self, store: TokenStore, *, first: int, stop: int) -> None:
        start, length = store.doc_start[first:stop], store.doc_length[first:stop]
        filled = length > 0
        start, length = start[filled], length[filled]
        breaks = np.flatnonzero(start[1:] != start[:-1] + length[:-1]) + 1
        firsts = np.concatenate([[0], breaks]) if len(start) else breaks
        ends = np.cumsum(length)
        self.length = int(ends[-1]) if len(ends) else 0
        self._store = store
        self._positions: list[int] = start[firsts].tolist()
        self._bases: list[int] = (ends - length)[firsts].tolist()
        self._shift = self._positions[0] if len(self._positions) == 1 else None

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """[stop - start] tokens; the row goes round, so positions past its end begin anew."""
        if self._shift is not None and stop <= self.length:
            return self._store.tokens(start + self._shift, stop + self._shift)
        pieces = []
        while start < stop:
            place = start % self.length
            run = bisect_right(self._bases, place) - 1
            end = self._bases[run + 1] if run + 1 < len(self._bases) else self.length
            count = min(stop - start, end - place)
            position = self._positions[run] + place - self._bases[run]
            pieces.append(self._store.tokens(position, position + count))
            start += count
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
