"""The files of an encrypted store: asked as those of a plain folder, and opened on the way."""

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mds_data.encryption.envelope import Envelope, envelope_from_json, is_envelope, unlock
from mds_data.encryption.keys import KeySource
from mds_data.encryption.segments import SealedFile
from mds_data.errors import DamagedError, ManifestError, SealedError
from mds_data.store.folder import StoreFolder, is_store, read_manifest_bytes, read_plain_file
from mds_data.store.records import FileRecord
from mds_data.store.schema import FORMAT_NAME, MANIFEST_LIMIT, MANIFEST_NAME, manifest_from_json

__all__ = ["SealedFiles", "SealedFolder", "is_sealed", "read_envelope"]


@dataclass(frozen=True, slots=True)
class SealedFiles:
    """The sealed files that an envelope names."""

    files: Mapping[str, FileRecord]
    revision: int = 0

    @classmethod
    def of(cls, envelope: Envelope) -> "SealedFiles":
        """The files of an envelope."""
        return cls(
            {
                name: FileRecord(size=size, sha256=digest)
                for name, (size, digest) in envelope.files.items()
            }
        )


def is_sealed(root: Path) -> bool:
    """Whether the store at ``root`` is encrypted."""
    return is_store(root) and is_envelope(read_manifest_bytes(root))


def read_envelope(root: Path) -> Envelope:
    """The open part of the encrypted store at ``root``.

    Raises:
        StoreError: It is none.
    """
    data = read_manifest_bytes(root)
    name = str(root / MANIFEST_NAME)
    if not is_envelope(data):
        raise SealedError(name, "is not that of an encrypted store", remedy="name another folder")
    envelope = envelope_from_json(data, name=name)
    if envelope.format != FORMAT_NAME:
        raise ManifestError(f"{name}: holds {envelope.format[:60]!r}, which is no token store")
    return envelope


class SealedFolder:
    """The files of an encrypted store, as its sealed manifest names them.

    Args:
        root: The store's folder.
        source: Where the key comes from.
        expect: Digest that the plain manifest must have.

    Raises:
        SealedError: The key is wrong, or something was changed.
        DamagedError: A sealed file is missing, or has another size.
    """

    def __init__(self, root: Path, source: KeySource, *, expect: str | None = None) -> None:
        self.root = root
        envelope = read_envelope(root)
        self._sealed = StoreFolder(root, SealedFiles.of(envelope))
        self.contents = unlock(
            envelope, source, read_file=self.read_sealed, name=str(root), expect=expect
        )
        self.manifest = manifest_from_json(
            self.contents.manifest, name=f"{root / MANIFEST_NAME} (sealed)"
        )
        self._check_names()

    def _check_names(self) -> None:
        """Every file of the manifest must have a sealed one of its own, and no other may be one."""
        places = [place for place, _ in self.contents.files.values()]
        unknown = [place for place in places if place not in self._sealed.manifest.files]
        if self.contents.files.keys() != self.manifest.files.keys() or unknown:
            raise DamagedError(
                f"{self.root}: the sealed files are not those that the manifest names; "
                f"restore the store from a copy"
            )

    def read_sealed(self, name: str) -> bytes:
        """A small file of the folder as it lies there."""
        return read_plain_file(self._sealed.path(name), limit=2 * MANIFEST_LIMIT)

    def read(self, relative: str) -> bytes:
        """All bytes of a file, opened."""
        file = self.file(relative)
        return bytes(file.read(0, file.size))

    def file(self, relative: str) -> SealedFile:
        """A file of the store, of which parts can be read."""
        if relative not in self.contents.files:
            raise DamagedError(f"{self.root / relative}: the manifest does not list this file")
        place, _ = self.contents.files[relative]
        handle, size = self._sealed.open(place)
        try:
            data = memoryview(_map(handle))
        finally:
            os.close(handle)
        name = f"{self.root / place} ({relative})"
        file = SealedFile(
            lambda start, count: data[start : start + count],
            size,
            key=self.contents.key(relative),
            name=name,
            keep=False,
        )
        if file.size != self.manifest.files[relative].size:
            raise DamagedError(f"{name}: has not the size that the manifest says")
        return file


def _map(handle: int) -> mmap.mmap:
    mapped = mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)
    return mapped
