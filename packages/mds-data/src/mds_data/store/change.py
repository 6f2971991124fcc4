"""Change a store in place: lock it, settle what a dead writer left, write files, commit once."""

import os
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from mds_data.errors import StoreError
from mds_data.store.commit import FileOperations, pending_name, replace_manifest, settle
from mds_data.store.folder import StoreFolder, read_manifest
from mds_data.store.lock import StoreLock
from mds_data.store.reader import ShardedArray
from mds_data.store.schema import MANIFEST_NAME, Manifest
from mds_data.store.token_store import StorePart

__all__ = ["StoreChange"]


class StoreChange:
    """The next revision of a store, while it is written.

    New files get names that wait for the commit, so the store stays what it was until then.

    Args:
        root: The store's folder.
        operations: Where file operations go.

    Raises:
        LockedError: Another writer is at work.
        StoreError: The store is made of segments.
    """

    def __init__(self, root: Path, *, operations: FileOperations | None = None) -> None:
        self.root = root
        self.operations = operations or FileOperations()
        self._written: list[Path] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            read_manifest(self.root)  # a wrong path should not leave a lock behind
            stack.enter_context(StoreLock(self.root))
            manifest, _ = read_manifest(self.root)
            if manifest.segments:
                raise StoreError(
                    f"{self.root}: is made of segments and can't be changed as a whole; change the "
                    f"stores it was merged from and merge them again, or repack it first"
                )
            folder = StoreFolder(self.root, manifest)
            settle(self.root, manifest, operations=self.operations, present=folder.present)
            self.folder = StoreFolder(self.root, manifest)
            self.manifest = manifest
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._stack:
            for path in self._written if self._is_unchanged() else ():
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def _is_unchanged(self) -> bool:
        """Whether the old revision is in force: a commit may fail after its rename counted."""
        try:
            return read_manifest(self.root)[0].revision == self.manifest.revision
        except (OSError, StoreError):
            return False

    @property
    def revision(self) -> int:
        """Number of the revision that is being written."""
        return self.manifest.revision + 1

    @cached_property
    def part(self) -> StorePart:
        """The arrays of the revision in force."""
        return StorePart(self.root, self.manifest, self.folder)

    def array(self, name: str) -> ShardedArray:
        """One array of the revision in force."""
        return ShardedArray(self.folder, name)

    def read_file(self, relative: str) -> bytes:
        """All bytes of a file of the revision in force."""
        return self.folder.read(relative)

    def linked_files(self) -> dict[str, tuple[int, int]]:
        """Device and inode of each file that has another name somewhere."""
        linked = {}
        for relative in self.manifest.files:
            status = self.folder.path(relative).stat()
            if status.st_nlink > 1:
                linked[relative] = (status.st_dev, status.st_ino)
        return linked

    def file(self, relative: str) -> Path:
        """The waiting name of a new file; the folders above it are made."""
        path = self.root / pending_name(relative, revision=self.revision)
        for folder in reversed(path.relative_to(self.root).parents[:-1]):
            if not (self.root / folder).is_dir():
                self.operations.make_folder(self.root / folder)
        if os.path.lexists(path):
            self.operations.remove(path)
        self._written.append(path)
        return path

    def commit(self, manifest: Manifest) -> Manifest:
        """Put the new revision in force."""
        self._written.append(self.root / pending_name(MANIFEST_NAME, revision=self.revision))
        replace_manifest(self.root, manifest, operations=self.operations)
        self._written = []
        present = StoreFolder(self.root, manifest).present
        settle(self.root, manifest, operations=self.operations, present=present)
        return manifest
