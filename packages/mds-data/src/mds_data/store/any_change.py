"""The next revision of a store, wherever it lies: in a folder or behind a network."""

import os
from pathlib import Path
from typing import Any, Protocol

from mds_data.store.change import StoreChange
from mds_data.store.commit import FileOperations
from mds_data.store.reader import ShardedArray
from mds_data.store.records import Manifest
from mds_data.store.remote_array import RemoteArray, RemoteOptions
from mds_data.store.remote_change import RemoteChange

__all__ = ["ArrayFiles", "begin_change"]


class ArrayFiles(Protocol):
    """What both kinds of change offer to one who rewrites arrays."""

    operations: FileOperations

    def array(self, name: str) -> ShardedArray | RemoteArray:
        """One array of the revision in force."""
        ...

    def read_file(self, relative: str) -> bytes:
        """All bytes of a file of the revision in force."""
        ...

    def file(self, relative: str) -> Path:
        """Where a new file is written."""
        ...

    def commit(self, manifest: Manifest) -> Manifest:
        """Put the new revision in force."""
        ...


def begin_change(
    store: Any,
    *,
    operations: FileOperations | None = None,
    options: RemoteOptions | None = None,
) -> StoreChange | RemoteChange:
    """The change of a store, which begins when it is entered.

    Args:
        store: Its folder, a URL, or a zarr store.
        operations: Where file operations go, for a folder.
        options: How it is reached, for a place behind a network.
    """
    if isinstance(store, os.PathLike) or (isinstance(store, str) and "://" not in store):
        return StoreChange(Path(store), operations=operations)
    return RemoteChange(store, options=options)
