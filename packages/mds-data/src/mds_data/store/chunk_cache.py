"""Chunks of remote stores on the local disk, shared by stores and processes."""

import hashlib
import os
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["ChunkCache"]


@dataclass(slots=True)
class ChunkCache:
    """Chunks of one store on the local disk, the least recently used go first.

    Args:
        folder: Of the cache; several stores and processes may share it.
        store: What the chunks belong to: uuid and digest of the manifest. Chunks of other
            revisions of the same store are removed, so that nothing erased stays.
        limit: Bytes of chunks that may lie in the folder, of all stores together.
    """

    folder: Path
    store: tuple[str, str]
    limit: int
    _written: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        own = hashlib.sha256(self.store[0].encode()).hexdigest()[:32]
        place = self.folder / own / self.store[1]
        place.mkdir(parents=True, exist_ok=True)
        for other in place.parent.iterdir():
            if other != place:
                shutil.rmtree(other, ignore_errors=True)

    def path(self, name: str) -> Path:
        """Where a chunk is kept."""
        own = hashlib.sha256(self.store[0].encode()).hexdigest()[:32]
        return self.folder / own / self.store[1] / hashlib.sha256(name.encode()).hexdigest()

    def get(self, name: str) -> bytes | None:
        """A chunk, if it is there."""
        path = self.path(name)
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        return data

    def put(self, name: str, data: bytes) -> None:
        """Keep a chunk; a full disk is no error, the chunk is just not kept."""
        path = self.path(name)
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        try:
            partial.write_bytes(data)
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            return
        if not self._written or self._written > self.limit // 8:
            self._written = 0
            self._shrink()
        self._written += len(data)

    def drop(self, name: str) -> None:
        """Forget a chunk that turned out to be damaged."""
        self.path(name).unlink(missing_ok=True)

    def _shrink(self) -> None:
        found = []
        for path in self.folder.rglob("*"):
            with suppress(OSError):
                status = path.stat()
                if path.is_file():
                    found.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.limit - self.limit // 8:
                return
            path.unlink(missing_ok=True)
            total -= size
