"""Save a checkpoint encrypted at once: every process seals its own file, one writes the envelope.

No plain byte reaches a disk on the way, as it would where a plain checkpoint is encrypted later.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, cast

from mds_ckpt import manifest as manifest_module
from mds_ckpt.commit import publish_files
from mds_ckpt.encryption.envelope import Sealing
from mds_ckpt.encryption.keys import KeySource
from mds_ckpt.encryption.segments import BLOCK_SIZE, SEGMENT_SIZE, FileKey, sealed_blocks
from mds_ckpt.files.file_operations import REAL, FileOperations
from mds_ckpt.manifest import FORMAT, FORMAT_VERSION, MANIFEST_NAME, CheckpointManifest, FileRecord

__all__ = ["SealedPlace", "SealedSave", "SealingOperations"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedPlace:
    """Where one process writes its file, and the key for it. Plain data: it can be pickled."""

    name: str
    """Of the sealed file."""
    key: FileKey = field(repr=False)


class SealingOperations(FileOperations):
    """A disk on which a written file comes out sealed; for one file, of a size that is known.

    Args:
        place: Where the file goes, whatever its plain name.
        operations: The disk itself.
    """

    def __init__(self, place: SealedPlace, operations: FileOperations = REAL) -> None:
        self._place = place
        self._operations = operations
        self._file: _SealingFile | None = None

    @property
    def record(self) -> FileRecord:
        """Size and digest of the sealed file that was written."""
        assert self._file is not None
        return self._file.record

    def create(self, path: Path) -> BinaryIO:
        """Refused: a sealed file says its size at its start."""
        raise ValueError(f"{path}: its size must be known to seal it")

    def create_sized(self, path: Path, size: int) -> BinaryIO:
        """Begin the sealed file beside where the plain one would lie."""
        inner = self._operations.create(path.with_name(self._place.name))
        self._file = _SealingFile(inner, size, key=self._place.key, operations=self._operations)
        return cast("BinaryIO", self._file)

    def write(self, file: BinaryIO, data: memoryview) -> None:
        """Seal what makes up whole blocks, keep the rest for the next time."""
        cast("_SealingFile", file).put(data)

    def sync(self, file: BinaryIO) -> None:
        """Write the last segment and force all to the disk."""
        cast("_SealingFile", file).finish()


class _SealingFile(io.RawIOBase):
    """Takes plain bytes in parts of any length and writes sealed segments."""

    def __init__(
        self, inner: BinaryIO, size: int, *, key: FileKey, operations: FileOperations
    ) -> None:
        self._inner = inner
        self._operations = operations
        self._missing = size
        self._kept = bytearray()
        self._blocks = sealed_blocks(self._take, size=size, cut=SEGMENT_SIZE, key=key)
        self._size, self._digest = 0, hashlib.sha256()
        self._write_next()  # the header takes no data

    @property
    def record(self) -> FileRecord:
        return FileRecord(size=self._size, sha256=self._digest.hexdigest())

    def put(self, data: memoryview) -> None:
        self._kept += data
        while len(self._kept) >= BLOCK_SIZE:
            self._write_next()

    def finish(self) -> None:
        if len(self._kept) != self._missing:
            raise ValueError(f"{self._missing - len(self._kept)} bytes were promised, not written")
        while self._write_next():
            pass
        self._operations.sync(self._inner)

    def close(self) -> None:
        self._inner.close()
        super().close()

    def _take(self, count: int) -> bytes:
        data = bytes(memoryview(self._kept)[:count])
        del self._kept[:count]
        self._missing -= count
        return data

    def _write_next(self) -> bool:
        block = next(self._blocks, None)
        if block is None:
            return False
        self._operations.write(self._inner, memoryview(block))
        self._digest.update(block)
        self._size += len(block)
        return True


class SealedSave:
    """The encryption of one checkpoint, as the process that publishes it sees it.

    Args:
        recipients: Public keys of age (``age1...``) that may open it.
        key: A passphrase or a key command that may open it, too.

    Raises:
        SealedError: If nobody could open it.
    """

    def __init__(self, *, recipients: Sequence[str] = (), key: KeySource | None = None) -> None:
        self._sealing = Sealing(
            format=FORMAT, format_version=FORMAT_VERSION, recipients=recipients, source=key
        )

    def place(self, name: str) -> SealedPlace:
        """Where a file goes that the manifest calls ``name``, and its key."""
        return SealedPlace(name=self._sealing.add(name), key=self._sealing.key(name))

    def publish(
        self,
        partial: Path,
        manifest: CheckpointManifest,
        *,
        sealed: Mapping[str, FileRecord],
        root: Path,
        existing: Literal["refuse", "replace"] = "refuse",
        operations: FileOperations = REAL,
    ) -> Path:
        """As `mds_ckpt.commit.publish`, with the envelope in place of the manifest.

        Args:
            partial: The folder with the sealed files.
            manifest: Describes the plain files.
            sealed: Size and digest of each sealed file, by its own name.
            root: The folder of checkpoints.
            existing: What to do with a checkpoint of that step.
            operations: The disk.
        """
        data = manifest_module.to_json(manifest)
        listed = {name: (record.size, record.sha256) for name, record in sealed.items()}
        envelope, small = self._sealing.finish(data, listed)
        return publish_files(
            partial,
            {**small, MANIFEST_NAME: envelope},
            step=manifest.step,
            root=root,
            existing=existing,
            operations=operations,
        )
