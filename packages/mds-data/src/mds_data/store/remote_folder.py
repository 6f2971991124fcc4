"""The files of one store folder behind a network, as its manifest names them."""

import hashlib
from concurrent.futures import Future
from pathlib import Path
from typing import cast

from mds_data.errors import DamagedError, StoreError
from mds_data.store.commit import pending_name
from mds_data.store.records import Manifest
from mds_data.store.remote_files import RemoteFiles
from mds_data.store.schema import MANIFEST_LIMIT, MANIFEST_NAME, manifest_from_json

__all__ = ["Location", "RemoteStoreFolder", "read_remote_manifest"]


class Location:
    """The place of a store, where other stores have a path."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    def __truediv__(self, other: str) -> "Location":
        return Location(f"{self.name}/{other}")


class RemoteStoreFolder:
    """The files that one manifest names.

    Args:
        files: All files of the place.
        prefix: Of the folder in it: empty, or the path of a segment with a slash at its end.
        manifest: What names them.
    """

    def __init__(self, files: RemoteFiles, prefix: str, manifest: Manifest) -> None:
        self.root = cast("Path", Location(f"{files.name}/{prefix}".rstrip("/")))
        self.manifest = manifest
        self._files = files
        self._prefix = prefix
        self._names: dict[str, str] = {}

    def start(self, path: str, start: int, length: int) -> "Future[bytes]":
        """Begin to read a range of a file that the manifest names."""
        name = self._prefix + self._current(path)
        return self._files.start(name, start, length, otherwise=self._prefix + path)

    def read_file(self, path: str) -> bytes:
        """All bytes of a file that the manifest names, which must be the very ones."""
        if path not in self.manifest.files:
            raise DamagedError(f"{self.root}/{path}: the manifest does not list this file")
        record = self.manifest.files[path]
        name = self._prefix + self._current(path)
        try:
            data = self._files.read(name, otherwise=self._prefix + path)
        except FileNotFoundError:
            raise DamagedError(
                f"{self.root}/{path}: is missing, and the manifest lists it; restore it from a copy"
            ) from None
        if hashlib.sha256(data).hexdigest() != record.sha256:
            raise DamagedError(
                f"{self.root}/{path}: the content differs from the manifest's digest; restore it "
                f"from a copy"
            )
        return data

    def _current(self, path: str) -> str:
        """The name under which a file lies, unless its writer has just moved it to its own."""
        if self.manifest.revision == 1:
            return path
        if path not in self._names:
            waiting = pending_name(path, revision=self.manifest.revision)
            try:
                self._files.start(self._prefix + waiting, 0, 1).result()
            except DamagedError:
                self._names[path] = path
            else:
                self._names[path] = waiting
        return self._names[path]


def read_remote_manifest(files: RemoteFiles, prefix: str = "") -> tuple[Manifest, bytes]:
    """The manifest of a store, or of a segment in it, and its bytes.

    Raises:
        FileNotFoundError: There is none.
    """
    name = f"{files.name}/{prefix}{MANIFEST_NAME}"
    try:
        data = files.read(prefix + MANIFEST_NAME)
    except FileNotFoundError:
        raise FileNotFoundError(f"{files.name}/{prefix}: there is no such store") from None
    if len(data) > MANIFEST_LIMIT:
        raise StoreError(f"{name}: has {len(data)} bytes, too many for a manifest")
    return manifest_from_json(data, name=name), data
