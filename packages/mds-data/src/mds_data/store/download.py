"""Bring stores from object storage to a folder, every file compared with its digest on the way."""

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mds_data.errors import DamagedError, StoreError
from mds_data.store.commit import (
    FileOperations,
    PartialFolder,
    check_free_name,
    make_folders,
    put_file,
)
from mds_data.store.remote_array import RemoteOptions
from mds_data.store.remote_files import RemoteFiles
from mds_data.store.remote_folder import RemoteStoreFolder, read_remote_manifest
from mds_data.store.schema import MANIFEST_NAME
from mds_data.store.sending import writable_place

__all__ = ["download_store", "local_sources"]

_DEEPEST = 4
_AT_ONCE = 4
"""Files that are fetched beside each other; each is held in memory whole."""


def download_store(
    location: Any, target: str | os.PathLike[str], *, options: RemoteOptions | None = None
) -> None:
    """Copy a store, its segments too, to a folder that must not exist yet.

    Raises:
        FileNotFoundError: There is no store.
        StoreError: What is there can't be trusted, or the folder exists.
        RemoteError: No try got an answer.
    """
    files = writable_place(location, options)
    data = read_remote_manifest(files)[1]
    root = Path(target)
    check_free_name(root)
    partial = PartialFolder(root, operations=FileOperations())
    try:
        _fetch(files, "", partial, data=data, depth=0)
        partial.sync_folders()
        put_file(partial.path / MANIFEST_NAME, data, operations=partial.operations)
        partial.operations.sync_folder(partial.path)
        partial.give_name()
    finally:
        if partial.path.exists():
            partial.discard()


def _fetch(
    files: RemoteFiles, prefix: str, partial: PartialFolder, *, data: bytes, depth: int
) -> None:
    """Fetch the files of one folder and of its segments; the manifest of the first comes last."""
    manifest, found = read_remote_manifest(files, prefix)
    if found != data:
        raise StoreError(f"{files.name}: was changed while it was fetched; try again")
    folder = RemoteStoreFolder(files, prefix, manifest)
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        names = list(manifest.files)
        for start in range(0, len(names), _AT_ONCE):
            some = names[start : start + _AT_ONCE]
            for name, content in zip(some, threads.map(folder.read_file, some), strict=True):
                put_file(partial.file(prefix + name), content, operations=partial.operations)
    if manifest.segments and depth == _DEEPEST:
        raise StoreError(f"{files.name}: segments lie more than {_DEEPEST} deep")
    for segment in manifest.segments:
        inner = f"{prefix}{segment.path}/"
        content = read_remote_manifest(files, inner)[1]
        if hashlib.sha256(content).hexdigest() != segment.manifest_sha256:
            raise DamagedError(
                f"{files.name}/{inner}: is not the segment that was merged; restore it from a copy"
            )
        _fetch(files, inner, partial, data=content, depth=depth + 1)
        put_file(partial.file(inner + MANIFEST_NAME), content, operations=partial.operations)


@contextmanager
def local_sources(
    sources: Sequence[str | os.PathLike[str]], *, beside: str | os.PathLike[str]
) -> Iterator[list[Path]]:
    """The sources as paths; those at URLs are fetched into a folder that is removed afterwards.

    Args:
        sources: Paths and URLs.
        beside: What is made of them; the folder lies beside it, so that files can be linked.
    """
    if not any(_is_url(source) for source in sources):
        yield [Path(source) for source in sources]
        return
    above = Path(beside).parent
    make_folders(above, operations=FileOperations())
    with tempfile.TemporaryDirectory(prefix=f"{Path(beside).name}.sources-", dir=above) as folder:
        paths = []
        for number, source in enumerate(sources):
            paths.append(Path(source))
            if _is_url(source):
                paths[-1] = Path(folder) / f"{number}-{str(source).rstrip('/').rpartition('/')[2]}"
                download_store(source, paths[-1])
        yield paths


def _is_url(source: str | os.PathLike[str]) -> bool:
    return isinstance(source, str) and "://" in source
