"""Join stores without rewriting them: each becomes a segment, by hard links where possible."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from mds_data.errors import StoreError
from mds_data.store.commit import (
    FileOperations,
    PartialFolder,
    check_free_name,
    make_folders,
    put_file,
    sweep,
)
from mds_data.store.download import local_sources
from mds_data.store.folder import StoreFolder, read_manifest
from mds_data.store.indexed_dataset import pair_prefix, read_indexed_dataset
from mds_data.store.lock import StoreLock
from mds_data.store.megatron import has_guessed_vocabulary, import_megatron, largest_id
from mds_data.store.new_store import new_uuid, put_groups, timestamp
from mds_data.store.schema import (
    MANIFEST_NAME,
    Counts,
    FileRecord,
    Manifest,
    Segment,
    TokenizerRecord,
)
from mds_data.store.split import split_ranges
from mds_data.store.token_store import open_store, store_parts

__all__ = ["common_vocabulary", "merge_stores"]


def merge_stores(
    sources: Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    *,
    split: str | Mapping[str, tuple[float, float]] | None = None,
    operations: FileOperations | None = None,
) -> Manifest:
    """Join stores in the order given; documents and tokens run on from one to the next.

    Args:
        sources: Stores with the same vocabulary, end-of-document id and tokenizer, or Megatron
            pairs, which are written as stores on the way. A source may stand twice; one at a URL
            such as ``s3://bucket/store`` is fetched.
        target: The merged store's folder; it must not exist yet.
        split: The split of all documents together.
        operations: Where file operations go.

    Raises:
        StoreError: The sources don't go together.
    """
    if not sources:
        raise ValueError("a merge needs at least one source")
    root = Path(target)
    check_free_name(root)
    ranges = split_ranges(split)
    with local_sources(sources, beside=root) as paths, ExitStack() as stack:
        for path in paths:
            with open_store(path) as source:  # what is wrong with a source should be said of it
                _ = source.doc_length
        vocab_size = common_vocabulary(paths)
        disk = operations or FileOperations()
        make_folders(root.parent, operations=disk)
        stack.enter_context(StoreLock(root))
        sweep(root)
        partial = PartialFolder(root, operations=disk)
        stack.callback(partial.discard)
        segments = [
            _put_segment(partial, path, f"segments/{number:04d}", vocab_size=vocab_size)
            for number, path in enumerate(paths)
        ]
        manifest = _merged(partial, segments, split=ranges)
        for part in store_parts(partial.path, manifest):
            part.tokens.close()
        partial.publish(manifest)
        return manifest


def _merged(
    partial: PartialFolder,
    segments: Sequence[Segment],
    *,
    split: Mapping[str, tuple[float, float]] | None,
) -> Manifest:
    """Write the files of the merged store itself; its manifest."""
    parts = [_read(partial.path / segment.path) for segment in segments]
    first = parts[0]
    files = put_groups(partial, columns=False)
    tokenizer = _put_tokenizer(partial, first, partial.path / segments[0].path, files)
    arguments = {"sources": len(segments)}
    return Manifest(
        uuid=new_uuid(files),
        created=timestamp(),
        requires=("segments/1",),
        vocab_size=max(part.vocab_size for part in parts),
        eod_id=first.eod_id,
        dtype=first.dtype,
        layout=first.layout,
        counts=_counts(parts),
        files=files,
        tokenizer=tokenizer,
        split=split,
        segments=tuple(segments),
        provenance={"transforms": [{"name": "merge", "arguments": arguments}]},
    )


def _read(root: Path) -> Manifest:
    return read_manifest(root)[0]


def common_vocabulary(paths: Sequence[Path]) -> int:
    """The sources' vocabulary, after a check that one store can hold them all.

    Imported pairs are not known to need more than the ids that were seen in them.
    """
    stores = {path: _read(path) for path in paths if not _is_pair(path)}
    pairs = {path: read_indexed_dataset(path) for path in paths if _is_pair(path)}
    facts: dict[str, dict[object, Path]] = {"vocab_size": {}, "eod_id": {}, "tokenizer": {}}
    needed: dict[int, Path] = {}
    for path, manifest in stores.items():
        tokenizer = manifest.tokenizer.sha256 if manifest.tokenizer else None
        sizes = needed if has_guessed_vocabulary(manifest) else facts["vocab_size"]
        sizes.setdefault(manifest.vocab_size, path)
        facts["eod_id"].setdefault(manifest.eod_id, path)
        facts["tokenizer"].setdefault(tokenizer, path)
    widths: dict[object, Path] = {}
    for path, manifest in stores.items():
        widths.setdefault(manifest.dtype, path)
    for path, pair in pairs.items():
        widths.setdefault(pair.tokens.dtype.name, path)
    for fact, found in {"token type": widths, **facts}.items():
        _check_one(fact, found)
    known = next(iter(facts["vocab_size"]), None)
    if isinstance(known, int):
        _check_one("vocab_size", facts["vocab_size"] | _above(known, needed))
        return known
    return max([*needed, *(largest_id(pair) + 1 for pair in pairs.values())])


def _above(known: int, needed: Mapping[int, Path]) -> dict[object, Path]:
    return {size: path for size, path in needed.items() if size > known}


def _check_one(fact: str, found: dict[object, Path]) -> None:
    if len(found) > 1:
        named = ", ".join(f"{path} has {value}" for value, path in found.items())
        raise StoreError(
            f"sources with different {fact} can't be merged: {named}; "
            f"tokenise them alike, or leave one out"
        )


def _is_pair(path: Path) -> bool:
    return not path.is_dir() and pair_prefix(path) is not None


def _put_segment(
    partial: PartialFolder, source: Path, relative: str, *, vocab_size: int
) -> Segment:
    if _is_pair(source):
        partial.file(f"{relative}/x")
        (partial.path / relative).rmdir()
        import_megatron(source, partial.path / relative, vocab_size=vocab_size)
    else:
        _link_store(partial, source, relative)
    manifest, data = read_manifest(partial.path / relative)
    return Segment(
        path=relative,
        uuid=manifest.uuid,
        revision=manifest.revision,
        manifest_sha256=hashlib.sha256(data).hexdigest(),
        documents=manifest.counts.documents,
        tokens=manifest.counts.tokens,
    )


def _link_store(partial: PartialFolder, source: Path, relative: str) -> None:
    """Give every file of a store, and of its segments, a second name below ``relative``."""
    manifest, data = read_manifest(source)
    folder = StoreFolder(source, manifest)
    for name in manifest.files:
        partial.operations.link(folder.path(name), partial.file(f"{relative}/{name}"))
    for segment in manifest.segments:
        _link_store(partial, source / segment.path, f"{relative}/{segment.path}")
    put_file(partial.file(f"{relative}/{MANIFEST_NAME}"), data, operations=partial.operations)
    StoreFolder(partial.path / relative, manifest)  # a source that changed meanwhile shows here


def _put_tokenizer(
    partial: PartialFolder, first: Manifest, segment: Path, files: dict[str, FileRecord]
) -> TokenizerRecord | None:
    if first.tokenizer is None:
        return None
    name = first.tokenizer.file
    partial.operations.link(segment / name, partial.file(name))
    files[name] = first.files[name]
    return first.tokenizer


def _counts(parts: Sequence[Manifest]) -> Counts:
    sentences = [part.counts.sentences for part in parts]
    known = [count for count in sentences if count is not None]
    return Counts(
        documents=sum(part.counts.documents for part in parts),
        tokens=sum(part.counts.tokens for part in parts),
        sentences=sum(known) if len(known) == len(sentences) else None,
    )
