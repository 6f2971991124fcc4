"""Change a store on object storage: claim it, send files beside the old ones, commit once.

What a killed writer leaves is no part of the store, because only the manifest says what is. Its
claim stays, so that nobody changes the store meanwhile who can't know whether it lives.
"""

import hashlib
import json
import secrets
import socket
import tempfile
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from mds_data.errors import StoreError
from mds_data.store.commit import FileOperations, leftover_files, pending_name
from mds_data.store.records import Manifest
from mds_data.store.remote import RemotePart
from mds_data.store.remote_array import RemoteArray, RemoteOptions
from mds_data.store.remote_folder import Location, read_remote_manifest
from mds_data.store.schema import MANIFEST_NAME, manifest_to_json
from mds_data.store.sending import Sending, writable_place

__all__ = ["RemoteChange"]

_CLAIM = "change.json"
"""Says who changes the store, while it is changed."""


class RemoteChange:
    """The next revision of a store behind a network, while it is written.

    New files are made in a temporary folder and sent when they are committed, under names that wait
    for the new manifest. Sending that is the commit; then they are sent to their own names.

    Args:
        location: A URL such as ``s3://bucket/store``, or a zarr store.
        options: Keys, endpoint and retries.

    Raises:
        StoreError: Another writer is at work or was killed, or the store is made of segments.
        RemoteError: No try got an answer.
    """

    def __init__(self, location: Any, *, options: RemoteOptions | None = None) -> None:
        self.operations = FileOperations()
        self._options = options or RemoteOptions()
        self._files = writable_place(location, options)
        self.root = cast("Path", Location(self._files.name))
        self._made: dict[str, Path] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        read_remote_manifest(self._files)  # a wrong place should not get a claim
        with ExitStack() as stack:
            self._claim()
            stack.callback(self._free)
            self.manifest, data = read_remote_manifest(self._files)
            if self.manifest.segments:
                raise StoreError(
                    f"{self.root}: is made of segments and can't be changed as a whole; repack it "
                    f"into a store of its own first"
                )
            self._digest = hashlib.sha256(data).hexdigest()
            self._settle(self.manifest)
            self._staging = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            stack.callback(self._clean)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def revision(self) -> int:
        """Number of the revision that is being written."""
        return self.manifest.revision + 1

    @cached_property
    def part(self) -> RemotePart:
        """The arrays of the revision in force."""
        return RemotePart(self._files, "", self.manifest, self._digest, self._options)

    def array(self, name: str) -> RemoteArray:
        """One array of the revision in force."""
        return self.part.array(name)

    def read_file(self, relative: str) -> bytes:
        """All bytes of a file of the revision in force."""
        return self.part.read_file(relative)

    def linked_files(self) -> dict[str, tuple[int, int]]:
        """Nothing: there are no hard links there."""
        return {}

    def file(self, relative: str) -> Path:
        """Where a new file is made; the folders above it exist."""
        path = self._staging / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self._made[relative] = path
        return path

    def commit(self, manifest: Manifest) -> Manifest:
        """Send the new files, and put the new revision in force."""
        sent = Sending(self._files)
        for relative, path in self._made.items():
            sent.put(pending_name(relative, revision=self.revision), path.read_bytes)
        sent.finish()
        self._files.put(MANIFEST_NAME, manifest_to_json(manifest)).result()
        self._settle(manifest)
        return manifest

    def _claim(self) -> None:
        owner = {"host": socket.gethostname(), "token": secrets.token_hex(16)}
        self._owner = json.dumps(owner).encode()
        if self._files.claim(_CLAIM, self._owner) != self._owner:
            raise StoreError(
                f"{self.root}: another writer changes it, or was killed; wait for it, or remove "
                f"{_CLAIM} there if nobody is at work"
            )

    def _free(self) -> None:
        with suppress(OSError):
            self._files.remove(_CLAIM)

    def _clean(self) -> None:
        """Remove what was sent without being committed; the next writer does it otherwise."""
        with suppress(OSError, StoreError):
            self._settle(read_remote_manifest(self._files)[0])

    def _settle(self, manifest: Manifest) -> None:
        """Send committed files to their own names, and remove what has another one."""
        sent = Sending(self._files)
        leftover = list(leftover_files(self._files.names(), manifest))
        for name, final in leftover:
            if final is not None:
                made = self._made.get(final) if manifest.revision == self.revision else None
                sent.put(final, made.read_bytes if made else partial(self._files.read, name))
        sent.finish()
        for name, _ in leftover:
            self._files.remove(name)
