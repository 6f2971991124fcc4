"""Bring a finished store to object storage: all files first, the manifest last.

Nothing is a store there before its manifest lies there, and that is one request. A second upload
to the same place is refused; the same upload, begun again after it was killed, goes on.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from mds_data.errors import DamagedError, StoreError
from mds_data.store.folder import StoreFolder, read_manifest
from mds_data.store.records import Manifest
from mds_data.store.remote import RemoteOptions
from mds_data.store.remote_files import RemoteError, RemoteFiles
from mds_data.store.schema import MANIFEST_NAME
from mds_data.store.sealed_folder import is_sealed
from mds_data.store.sending import OnBytes, Sending, writable_place
from mds_data.store.token_store import checked_segment

__all__ = ["check_free_place", "check_writable", "upload_files", "upload_store"]

_CLAIM = "upload.json"
"""Says which manifest is coming, while the files before it are sent."""
_PROBE = "upload.probe"


def upload_store(
    source: str | os.PathLike[str],
    location: Any,
    *,
    options: RemoteOptions | None = None,
    on_bytes: OnBytes | None = None,
) -> Manifest:
    """Copy a store from a folder to a place behind a network, which must not hold one.

    Every file's digest is compared on the way out, and its size at its destination.

    Args:
        source: The store's folder.
        location: A URL such as ``s3://bucket/store``, or a zarr store whose root it becomes.
        options: Keys, endpoint and retries.
        on_bytes: Called with the bytes of each file that has arrived.

    Raises:
        StoreError: There is another store, or another upload is on its way.
        DamagedError: The source is not what its manifest says.
        RemoteError: No try got through. What was sent is no store without a manifest.
    """
    root = Path(source)
    if is_sealed(root):
        raise StoreError(
            f"{root}: is encrypted, and encrypted stores are read from folders only; copy the "
            f"folder as it is by the tools of the service"
        )
    manifest, data = read_manifest(root)
    files = writable_place(location, options)
    folders = list(_folders(root, manifest, data))
    if _is_free(files, claim=data):
        sent = Sending(files, on_bytes=on_bytes)
        for prefix, folder, _ in folders:
            for path in folder.manifest.files:
                sent.put(prefix + path, partial(_checked, folder, path))
        for prefix, _, segment in folders[1:]:
            sent.put(prefix + MANIFEST_NAME, partial(bytes, segment))
        sent.finish()
        if files.claim(MANIFEST_NAME, data) != data:
            raise StoreError(f"{files.name}: another store appeared there meanwhile")
    with suppress(RemoteError, FileNotFoundError):  # the store is there already
        files.remove(_CLAIM)
    return manifest


def check_free_place(location: Any, *, options: RemoteOptions | None = None) -> None:
    """Raise StoreError if there is a store at a place already."""
    files = writable_place(location, options)
    if files.find(MANIFEST_NAME) is not None:
        raise _taken(files)


def check_writable(location: Any, *, options: RemoteOptions | None = None) -> None:
    """Write a little and remove it, before hours of work are spent on what shall lie there.

    Raises:
        FileNotFoundError: There is no such bucket.
        PermissionError: Nothing may be written there.
        RemoteError: No try got an answer.
    """
    files = writable_place(location, options)
    files.put(_PROBE, b"").result()
    files.remove(_PROBE)


def upload_files(paths: list[Path], location: Any, *, options: RemoteOptions | None = None) -> None:
    """Copy plain files to names that must be free; the last one is sent when all others are there.

    Raises:
        StoreError: A name is taken.
        RemoteError: No try got through.
    """
    files = writable_place(location, options)
    taken = [path.name for path in paths if files.size(path.name) is not None]
    if taken:
        raise StoreError(f"{files.name}/{taken[0]}: exists; choose another name or remove it first")
    for group in (paths[:-1], paths[-1:]):
        sent = Sending(files)
        for path in group:
            sent.put(path.name, path.read_bytes)
        sent.finish()


def _folders(
    root: Path, manifest: Manifest, data: bytes, prefix: str = ""
) -> Iterator[tuple[str, StoreFolder, bytes]]:
    """The store's folder, then its segments, each with its path and its manifest's bytes."""
    yield prefix, StoreFolder(root, manifest), data
    for segment in manifest.segments:
        inner = root / segment.path
        found = checked_segment(root, segment, parent=manifest)
        yield from _folders(inner, found, read_manifest(inner)[1], f"{prefix}{segment.path}/")


def _is_free(files: RemoteFiles, *, claim: bytes) -> bool:
    """Whether the files are still to be sent; the place is claimed for them then."""
    found = files.find(MANIFEST_NAME)
    if found is not None:
        if found == claim:
            return False
        raise _taken(files)
    ours = hashlib.sha256(claim).hexdigest().encode()
    if files.claim(_CLAIM, ours) != ours:
        raise StoreError(
            f"{files.name}: another upload is on its way there, or was killed; choose another "
            f"name, or remove what is there ({_CLAIM} too) if nobody is at work"
        )
    return True


def _taken(files: RemoteFiles) -> StoreError:
    return StoreError(f"{files.name}: holds a store; choose another name or remove it first")


def _checked(folder: StoreFolder, path: str) -> bytes:
    data = folder.read(path)
    if hashlib.sha256(data).hexdigest() != folder.manifest.files[path].sha256:
        raise DamagedError(
            f"{folder.path(path)}: the content differs from the manifest's digest; it was damaged "
            f"or is being changed"
        )
    return data
