"""The commands on whole stores: verify, merge, split, import, export, repack, erase, repair."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from mds_data.commands.errors import UsageError
from mds_data.commands.key_options import key_of
from mds_data.commands.output import write
from mds_data.commands.progress import megabytes
from mds_data.errors import DataError
from mds_data.store.schema import Manifest

__all__ = [
    "erase",
    "export",
    "import_",
    "merge",
    "repack",
    "repair",
    "split",
    "verify",
]


def verify(arguments: argparse.Namespace) -> int:
    """Check a store; 1 if anything is wrong."""
    from mds_data.store.sealed_folder import is_sealed
    from mds_data.store.verify import verify_remote_store, verify_store

    key = key_of(arguments)
    if isinstance(arguments.path, str):
        if key is not None or arguments.expect is not None:
            raise UsageError("a key or --expect needs a store in a folder, not a URL.")
        report = verify_remote_store(arguments.path)
    else:
        report = verify_store(arguments.path, key=key, expect=arguments.expect)
    write([*report.problems, *(f"note: {note}" for note in report.notes)])
    if not report.sound:
        count = len(report.problems)
        write([f"{arguments.path}: {count} fault{'s' if count > 1 else ''} found."])
        return 1
    read = f"{report.files:,} files, {megabytes(report.size)} MB"
    held = f", {report.documents:,} documents, {report.tokens:,} tokens"
    unread = key is None and is_sealed(Path(arguments.path))
    write([f"{arguments.path} is sound: {read}{'' if unread else held}, every byte checked."])
    return 0


def merge(arguments: argparse.Namespace) -> int:
    """Join stores by links, or the parts of a difficulty index."""
    from mds_data.difficulty.index import is_index
    from mds_data.store.download import local_sources
    from mds_data.store.join import join_stores, task_order
    from mds_data.store.merge import merge_stores

    if any(is_index(source) for source in arguments.sources if isinstance(source, Path)):
        return _merge_indexes(arguments)
    target, split = arguments.output, _share(arguments.split)
    with local_sources(arguments.sources, beside=target) as sources:
        if arguments.rewrite:
            joined = join_stores(sources, target, split=split)
            _say(f"{_counts(joined)} in {target}")
            return 0
        manifest = merge_stores(task_order(sources), target, split=split)
    _say(f"{len(manifest.segments)} segments, {_counts(manifest)} in {target}")
    return 0


def _merge_indexes(arguments: argparse.Namespace) -> int:
    from mds_data.difficulty.index import join_parts

    if arguments.rewrite or arguments.split is not None:
        raise UsageError("--rewrite and --split are for stores; an index needs neither.")
    index = join_parts(arguments.sources, arguments.output)
    rows = next(iter(index.metrics.values()))["count"]
    _say(f"{rows:,} {index.unit}s, {', '.join(index.metrics)} in {arguments.output}")
    return 0


def split(arguments: argparse.Namespace) -> int:
    """Write the parts of a split as stores."""
    from mds_data.store.repack import split_store

    parts = split_store(
        arguments.store,
        arguments.output,
        split=_share(arguments.split),
        layout=arguments.layout,
    )
    for name, manifest in parts.items():
        _say(f"{_counts(manifest)} in {arguments.output / name}")
    return 0


def import_(arguments: argparse.Namespace) -> int:
    """Write a Megatron pair as a store."""
    from mds_data.store.megatron import import_megatron

    manifest = import_megatron(
        arguments.prefix,
        arguments.output,
        vocab_size=arguments.vocab_size,
        eod_id=arguments.eod_id,
        layout=arguments.layout,
    )
    _say(f"{_counts(manifest)} in {arguments.output}")
    return 0


def repair(arguments: argparse.Namespace) -> int:
    """Write the true documents of a pair with the --append-eod fault as a store."""
    from mds_data.store.megatron import repair_append_eod

    manifest = repair_append_eod(
        arguments.prefix,
        arguments.output,
        vocab_size=arguments.vocab_size,
        layout=arguments.layout,
    )
    _say(f"{_counts(manifest)}, each with its end token {manifest.eod_id}, in {arguments.output}")
    return 0


def export(arguments: argparse.Namespace) -> int:
    """Write a store as a Megatron pair."""
    from mds_data.store.megatron import export_megatron
    from mds_data.store.token_store import open_store

    prefix = arguments.output_prefix
    with open_store(arguments.store, key=key_of(arguments), expect=arguments.expect) as store:
        export_megatron(store, prefix)
    size = sum(prefix.with_name(f"{prefix.name}{end}").stat().st_size for end in (".bin", ".idx"))
    _say(f"{megabytes(size)} MB in {prefix}.bin and {prefix}.idx")
    return 0


def repack(arguments: argparse.Namespace) -> int:
    """Write a store anew in another layout."""
    from mds_data.store.repack import repack_store

    manifest = repack_store(arguments.store, arguments.output, layout=arguments.layout)
    size = sum(record.size for record in manifest.files.values())
    _say(f"{_counts(manifest)}, {megabytes(size)} MB ({manifest.layout}) in {arguments.output}")
    return 0


def erase(arguments: argparse.Namespace) -> int:
    """Overwrite documents; 1 if copies of them are left in other files."""
    from mds_data.store.erase import erase_documents

    if isinstance(arguments.store, str) and arguments.search is not None:
        raise UsageError("--search looks for hard links, and a store at a URL has none.")
    numbers = sorted({number for text in arguments.documents for number in _numbers(text)})
    try:
        report = erase_documents(
            arguments.store, numbers, reason=arguments.reason, search=arguments.search
        )
    except IndexError as error:
        raise DataError(str(error)) from None
    _say(
        f"{len(report.documents):,} documents with {report.tokens:,} tokens overwritten; "
        f"{arguments.store} is now at revision {report.revision}"
    )
    if isinstance(arguments.store, str) and report.documents:
        _say("If the service keeps old versions of objects, remove those of this store too.")
    for store in report.linked_stores:
        write([f"{store} shares their files and still holds them; erase them there too."])
    if report.linked_files and not report.linked_stores:
        write([f"{path} has another hard link, so a copy is left." for path in report.linked_files])
    return 1 if report.linked_files else 0


def _numbers(text: str) -> Iterator[int]:
    """Yield the document numbers of ``5`` or ``5-9`` (both ends included)."""
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise UsageError(f"--documents takes numbers such as 5 or 5-9, not {text!r}.")
    yield from range(int(first), int(last if dash else first) + 1)


def _share(split: str | None) -> str | None:
    """Return a split string that was checked, so that a wrong one is wrong usage."""
    from mds_data.store.split import split_weights

    if split is not None:
        try:
            split_weights(split)
        except ValueError as error:
            raise UsageError(str(error)) from None
    return split


def _counts(manifest: Manifest) -> str:
    return f"{manifest.counts.documents:,} documents, {manifest.counts.tokens:,} tokens"


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
