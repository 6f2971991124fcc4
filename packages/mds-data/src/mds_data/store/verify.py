"""Read a whole store and say everything that is wrong with it, one sentence each."""

import hashlib
import os
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from mds_data.encryption.keys import KeySource
from mds_data.errors import DataError
from mds_data.store.commit import pending_name
from mds_data.store.folder import (
    FileList,
    StoreFolder,
    file_problems,
    open_plain_file,
    read_manifest,
)
from mds_data.store.indexed_dataset import find_append_eod_fault, pair_prefix, read_indexed_dataset
from mds_data.store.reader import ShardedArray
from mds_data.store.remote import RemoteOptions, RemotePart, open_remote_store
from mds_data.store.schema import MANIFEST_NAME, Manifest, Producer, has_digest
from mds_data.store.sealed_folder import SealedFiles, SealedFolder, is_sealed, read_envelope
from mds_data.store.token_store import StorePart, check_expected, checked_segment

__all__ = ["VerifyReport", "verify_remote_store", "verify_store"]

_BLOCK = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """What a check found."""

    problems: tuple[str, ...]
    """What is wrong; each names a file and says what."""
    notes: tuple[str, ...]
    """What is odd but harms nothing, such as files of a writer that died."""
    files: int
    """Files read."""
    size: int
    """Bytes read."""
    documents: int
    tokens: int

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify_store(
    path: str | os.PathLike[str], *, key: KeySource | None = None, expect: str | None = None
) -> VerifyReport:
    """Check a store, its segments, or a Megatron pair: every byte and every promise.

    Found are flipped bits, missing, cut and foreign files, documents out of order, and tokens
    outside the vocabulary.

    Args:
        path: The store.
        key: Opens an encrypted store; without it, its sealed bytes are compared only.
        expect: Digest that the plain manifest must have.

    Raises:
        FileNotFoundError: There is nothing at ``path``.
    """
    root = Path(path)
    check = _Check()
    if is_sealed(root):
        check.sealed(root, key, expect)
    elif not root.is_dir() and pair_prefix(root) is not None:
        check.pair(root)
    else:
        if not os.path.lexists(root):
            raise FileNotFoundError(f"{root}: there is no such store; check the path")
        check.store(root, expect=expect)
    return check.report()


def verify_remote_store(location: Any, *, options: RemoteOptions | None = None) -> VerifyReport:
    """Check a store behind a network: every byte that the manifest names, and every promise.

    Files that no manifest names are not looked for there.

    Args:
        location: A URL, or a zarr store.
        options: How it is read; the local cache is passed over.

    Raises:
        FileNotFoundError: There is no store.
        RemoteError: No try got an answer.
    """
    check = _Check()
    try:
        plain = replace(options or RemoteOptions(), cache=None)
        with open_remote_store(location, options=plain) as store:
            for part in store.parts:
                check.remote_part(cast("RemotePart", part))
    except DataError as error:
        check.problems.append(str(error))
    return check.report()


class _Check:
    """The findings, and the walk that collects them."""

    def remote_part(self, part: RemotePart) -> None:
        before = len(self.problems)
        for path, record in part.manifest.files.items():
            self.files += 1
            self.size += record.size
            try:
                part.read_file(path)
            except DataError as error:
                self.problems.append(str(error))
        if len(self.problems) == before:
            self._content(part)

    def report(self) -> VerifyReport:
        return VerifyReport(
            problems=tuple(self.problems),
            notes=tuple(self.notes),
            files=self.files,
            size=self.size,
            documents=self.documents,
            tokens=self.tokens,
        )

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.files = self.size = self.documents = self.tokens = 0

    def pair(self, prefix: Path) -> None:
        try:
            pair = read_indexed_dataset(prefix)
        except DataError as error:
            self.problems.append(str(error))
            return
        self.files, self.size = 2, pair.tokens.size
        self.documents, self.tokens = pair.num_documents, int(pair.sizes.sum())
        fault = find_append_eod_fault(pair)
        if fault is not None:
            self.problems.append(
                f"{pair.root}.idx: has the --append-eod fault: the end token {fault.eod_id} of "
                f"each of {fault.documents} documents is not counted, so they are read shifted; "
                f"write them right with mds-data repair"
            )
        elif pair.tokens.length != self.tokens:
            self.notes.append(
                f"{pair.root}.bin: holds {pair.tokens.length} tokens, and the index knows "
                f"{self.tokens} of them"
            )

    def sealed(self, root: Path, key: KeySource | None, expect: str | None) -> None:
        """An encrypted store: its sealed bytes, and with the key all that is in them."""
        try:
            self._files(root, SealedFiles.of(read_envelope(root)))
        except DataError as error:
            self.problems.append(str(error))
        if key is None:
            self.notes.append(
                f"{root}: is encrypted, so only the sealed bytes were compared; give its key to "
                f"check what is in them"
            )
        elif not self.problems:
            # The sealed bytes are right: what does not open now, the key is to blame for.
            self._sealed_content(SealedFolder(root, key, expect=expect))

    def _sealed_content(self, folder: SealedFolder) -> None:
        try:
            for path, record in folder.manifest.files.items():
                if hashlib.sha256(folder.read(path)).hexdigest() != record.sha256:
                    self.problems.append(
                        f"{folder.root / path}: the content differs from the manifest's digest"
                    )
            self._content(StorePart(folder.root, folder.manifest, folder))
        except DataError as error:
            self.problems.append(str(error))

    def store(
        self,
        root: Path,
        *,
        manifest: Manifest | None = None,
        depth: int = 0,
        expect: str | None = None,
    ) -> None:
        try:
            found, data = read_manifest(root)
            check_expected(root, data, expect)
        except DataError as error:
            self.problems.append(str(error))
            return
        manifest = manifest or found
        if manifest.producer.name == Producer().name and not has_digest(data):
            self.problems.append(
                f"{root / MANIFEST_NAME}: lacks its own digest, which mds-data writes always; "
                f"restore it from a copy"
            )
        before = len(self.problems)
        self._files(root, manifest, inner={segment.path for segment in manifest.segments})
        if len(self.problems) > before:
            return  # what a broken file holds would only repeat it in other words
        if manifest.segments:
            self._segments(root, manifest, depth=depth)
            return
        try:
            self._content(StorePart(root, manifest))
        except DataError as error:
            self.problems.append(str(error))

    def _segments(self, root: Path, manifest: Manifest, *, depth: int) -> None:
        if depth == 4:
            self.problems.append(f"{root}: segments lie more than 4 deep")
            return
        documents, tokens = self.documents, self.tokens
        for segment in manifest.segments:
            try:
                found = checked_segment(root, segment, parent=manifest)
            except DataError as error:
                self.problems.append(str(error))
            else:
                self.store(root / segment.path, manifest=found, depth=depth + 1)
        counted = (self.documents - documents, self.tokens - tokens)
        said = (manifest.counts.documents, manifest.counts.tokens)
        if counted != said and not self.problems:
            self.problems.append(
                f"{root / MANIFEST_NAME}: says {said[0]} documents and {said[1]} tokens, and the "
                f"segments hold {counted[0]} and {counted[1]}"
            )

    def _files(self, root: Path, manifest: FileList, inner: Set[str] = frozenset()) -> None:
        """Sizes and digests of all named files, and files that no one named."""
        absent = file_problems(root, manifest)
        self.problems.extend(absent.values())
        for path, record in manifest.files.items():
            if path in absent:
                continue
            waiting = root / pending_name(path, revision=manifest.revision)
            digest = _digest(waiting if waiting.exists() else root / path)
            self.files += 1
            self.size += record.size
            if digest != record.sha256:
                self.problems.append(f"{root / path}: {_damage(root, manifest, path)}")
        for path in _all_files(root, inner):
            if path not in manifest.files and path != MANIFEST_NAME:
                self.notes.append(
                    f"{root / path}: is not part of the store (left by a writer that was stopped, "
                    f"or put there by someone); readers pass it over"
                )

    def _content(self, part: StorePart | RemotePart) -> None:
        _, lengths = part.bounds()
        self.documents += len(lengths)
        self.tokens += int(lengths.sum())
        counts = part.manifest.counts
        if int(lengths.sum()) != counts.tokens:
            self.problems.append(
                f"{part.root / MANIFEST_NAME}: says {counts.tokens} tokens, and the documents hold "
                f"{int(lengths.sum())}"
            )
        self._vocabulary(part)
        for path in part.manifest.files:
            name = path.removesuffix("/zarr.json")
            if name.startswith("columns/") and path.endswith("/zarr.json"):
                part.document_array(name)
        if counts.sentences is not None:
            self._sentences(part)

    def _vocabulary(self, part: StorePart | RemotePart) -> None:
        layout, vocab_size = part.tokens.layout, part.manifest.vocab_size
        for start in range(0, part.tokens.length, layout.chunk):
            ids = part.tokens.read(start, min(start + layout.chunk, part.tokens.length))
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= vocab_size:
                position = start + int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
                shard, chunk = divmod(start // layout.chunk, layout.chunks_per_shard)
                self.problems.append(
                    f"{part.root}/tokens/c/{shard} chunk {chunk}: token {ids[position - start]} "
                    f"at position {position} is outside the vocabulary of {vocab_size}"
                )
                return

    def _sentences(self, part: StorePart | RemotePart) -> None:
        lengths, counts = part.sentence_length(), part.document_array("doc_sentences")
        _, tokens = part.bounds()
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        borders = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        if borders[-1] != len(lengths) or len(lengths) != part.manifest.counts.sentences:
            self.problems.append(
                f"{part.root}/doc_sentences: counts {borders[-1]} sentences, and there are "
                f"{len(lengths)}"
            )
        elif (np.diff(ends[borders]) != tokens).any():
            number = int(np.flatnonzero(np.diff(ends[borders]) != tokens)[0])
            self.problems.append(
                f"{part.root}/sentence_length: the sentences of document {number} don't add up to "
                f"its {tokens[number]} tokens"
            )


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    handle, _ = open_plain_file(path)
    with os.fdopen(handle, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _damage(root: Path, manifest: FileList, path: str) -> str:
    """Where in a shard the damage is, as far as its checksums tell."""
    changed = "the content differs from the manifest's digest; restore it from a copy"
    name, separator, number = path.rpartition("/c/")
    if not separator or not number.isdecimal():
        return changed
    try:
        array = ShardedArray(StoreFolder(root, manifest), name)
        first = int(number) * array.layout.shard
        for start in range(
            first, min(first + array.layout.shard, array.length), array.layout.chunk
        ):
            array.read(start, start + 1)
    except DataError as error:
        return f"{changed} ({str(error).rpartition('/')[2]})"
    return f"{changed} (every checksum inside is right, so it is another store's shard)"


def _all_files(root: Path, inner: Set[str]) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        relative = Path(folder).relative_to(root)
        folders[:] = sorted(name for name in folders if (relative / name).as_posix() not in inner)
        for name in sorted(names):
            yield (relative / name).as_posix()
