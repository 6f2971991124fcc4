"""The files of an encrypted folder, once its key has opened the sealed manifest."""

from __future__ import annotations

from pathlib import Path

from mds_ckpt.encryption.envelope import (
    ENVELOPE_LIMIT,
    Contents,
    Envelope,
    envelope_from_json,
    is_envelope,
    unlock,
)
from mds_ckpt.encryption.keys import KeySource
from mds_ckpt.errors import RejectedError, SealedError
from mds_ckpt.files.regular_file import read_whole
from mds_ckpt.files.sealed_file import SealedRegularFile

__all__ = ["SealedFolder", "is_sealed", "read_envelope"]

_ENVELOPE = "manifest.json"
_FORMAT = "mds-checkpoint"
_LARGEST_MANIFEST = 600 << 20


def is_sealed(folder: Path) -> bool:
    """Whether a folder is an encrypted checkpoint."""
    path = folder / _ENVELOPE
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return is_envelope(file.read(4096))


def read_envelope(folder: Path) -> Envelope:
    """The open part of an encrypted checkpoint; SealedError if it is none."""
    path = folder / _ENVELOPE
    data = read_whole(path, limit=ENVELOPE_LIMIT)
    envelope = envelope_from_json(data, name=str(path)) if is_envelope(data) else None
    if envelope is None or envelope.format != _FORMAT:
        raise SealedError(path, "it is not that of an encrypted checkpoint", remedy="name another")
    return envelope


class SealedFolder:
    """An encrypted checkpoint, unlocked.

    Args:
        folder: Its folder.
        source: Where the key comes from.
        expect: Digest that the plain manifest must have.
    """

    def __init__(self, folder: Path, source: KeySource, *, expect: str | None = None) -> None:
        self.folder = folder
        self.contents: Contents = _unlocked(folder, source, expect=expect)

    def file(self, name: str, size: int) -> SealedRegularFile:
        """The file that has ``size`` bytes when it is opened; RejectedError if there is none."""
        if name not in self.contents.files:
            raise RejectedError(
                self.folder / name,
                "the manifest lists it and no sealed file holds it",
                remedy="restore the checkpoint from a copy",
            )
        stored, _ = self.contents.files[name]
        return SealedRegularFile(
            self.folder / name,
            stored=self.folder / stored,
            key=self.contents.key(name),
            size=size,
        )


def _unlocked(folder: Path, source: KeySource, *, expect: str | None) -> Contents:
    """Unlock a folder; once more where another process changes its keys meanwhile."""
    envelope = read_envelope(folder)
    try:
        return _unlock(folder, envelope, source, expect=expect)
    except RejectedError:
        newer = read_envelope(folder)
        if newer == envelope:
            raise
        return _unlock(folder, newer, source, expect=expect)


def _unlock(folder: Path, envelope: Envelope, source: KeySource, *, expect: str | None) -> Contents:
    return unlock(
        envelope,
        source,
        read_file=lambda name: read_whole(folder / name, limit=_LARGEST_MANIFEST),
        name=str(folder),
        expect=expect,
    )
