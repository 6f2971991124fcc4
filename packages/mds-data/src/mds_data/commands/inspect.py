"""The command inspect: counts, lengths, frequent tokens and samples, for eyes or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from mds_data.commands.inspect_page import page
from mds_data.commands.key_options import key_of
from mds_data.commands.output import bar, printable, write
from mds_data.commands.progress import megabytes
from mds_data.commands.text import new_file
from mds_data.errors import DataError
from mds_data.store.folder import is_store, read_manifest_bytes
from mds_data.store.inspection import Inspection, inspect_store
from mds_data.store.schema import Manifest, manifest_to_json
from mds_data.store.token_store import TokenStore, open_store
from mds_data.tokenizers import load_tokenizer, spec_of_store_file

__all__ = ["inspect"]

Decode = Callable[[list[int]], str]

_LABEL = 12
_SAMPLE_LINES = 3
_COLUMN_VALUES = 8


def inspect(arguments: argparse.Namespace) -> int:
    """Print what a store holds."""
    store = open_store(arguments.path, key=key_of(arguments), expect=arguments.expect)
    if arguments.croissant is not None:
        return describe(store, arguments)
    found = inspect_store(store, top=arguments.top, samples=arguments.samples)
    decode, remark = decoder(store)
    if arguments.html is not None:
        with new_file(arguments.html, overwrite=arguments.overwrite) as file:
            file.write(page(found, decode, remark).encode("utf-8", "backslashreplace"))
        sys.stderr.write(f"inspect: look at {arguments.html}\n")
        return 0
    if arguments.json:
        write([json.dumps(as_json(found, decode), indent=1)])
        return 0
    lines = [*facts(found, decode, remark), *lengths(found), *columns(found)]
    write([*lines, *top_tokens(found, decode), *samples(found, decode)])
    return 0


def describe(store: TokenStore, arguments: argparse.Namespace) -> int:
    """Write the store's description for catalogues."""
    from mds_data.provenance.croissant import croissant
    from mds_data.provenance.family import store_families

    root = Path(store.path)
    if not is_store(root):
        raise DataError(f"{root}: only a store in a folder can be described; import it first")
    described = croissant(
        root,
        store.manifest,
        families=store_families(root, store.manifest),
        data=read_manifest_bytes(root),
    )
    with new_file(arguments.croissant, overwrite=arguments.overwrite) as file:
        file.write(json.dumps(described, indent=1, ensure_ascii=False).encode() + b"\n")
    sys.stderr.write(f"inspect: the description is in {arguments.croissant}\n")
    return 0


def decoder(store: TokenStore) -> tuple[Decode | None, str]:
    """Return what makes text of ids, if the store keeps its tokenizer, and else a remark."""
    record = store.manifest.tokenizer
    if record is None:
        return None, "none kept; ids are shown instead of text"
    if store.is_encrypted:
        return None, "kept encrypted; ids are shown, since no plain copy of it is written"
    name = f"{record.name}, " if record.name not in {None, record.file} else ""
    about = f"{name}kept as {record.file}, sha256 {record.sha256[:12]}"
    try:
        with kept_tokenizer_file(store, record.file) as path:
            return load_tokenizer(spec_of_store_file(path, kind=record.kind)).decode, about
    except (DataError, OSError) as error:
        return None, f"{about}; can't be used: {error}"


@contextmanager
def kept_tokenizer_file(store: TokenStore, name: str) -> Iterator[Path]:
    """The tokenizer's file; a copy of it while in the block, if the store lies elsewhere."""
    read = getattr(store, "read_file", None)
    if read is None:
        yield Path(store.path) / name
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / Path(name).name
        path.write_bytes(read(name))
        yield path


def as_json(found: Inspection, decode: Decode | None) -> dict[str, object]:
    """Return everything as JSON values, texts added."""
    result = {key: value for key, value in asdict(found).items() if key != "manifest"}
    result["manifest"] = json.loads(manifest_to_json(found.manifest))
    if decode is not None:
        for token in result["top_tokens"]:
            token["text"] = decode([token["token"]])
        for sample in result["samples"]:
            sample["text"] = decode(list(sample["tokens"]))
    return result


def facts(found: Inspection, decode: Decode | None, tokenizer: str) -> Iterator[str]:
    """Yield the table of single facts."""
    manifest = found.manifest
    empty = f", {found.empty_documents:,} empty or erased" if found.empty_documents else ""
    gaps = f", {found.gap_tokens:,} positions in gaps" if found.gap_tokens else ""
    yield found.path
    yield _fact("documents", f"{found.documents:,}{empty}")
    yield _fact("tokens", f"{found.tokens:,} as {manifest.dtype}{gaps}")
    yield _fact("vocabulary", f"{manifest.vocab_size:,}, {found.distinct_tokens:,} of them seen")
    yield _fact("size", f"{megabytes(found.size)} MB, {manifest.layout} layout")
    if manifest.segments:
        yield _fact("segments", f"{len(manifest.segments)} merged stores")
    yield _fact("tokenizer", tokenizer)
    if manifest.eod_id is not None:
        text = f"  {decode([manifest.eod_id])!r}" if decode else ""
        yield _fact("end token", f"{manifest.eod_id}{text}")
    if manifest.split:
        yield _fact("split", _split(manifest, documents=found.documents))
    inputs = manifest.provenance.get("inputs", ())
    origin = f" from {len(inputs)} input file{'s' * (len(inputs) > 1)}" if inputs else ""
    made = (manifest.created or "at no recorded time").replace("T", " ")
    yield _fact("made", f"{made} by {manifest.producer.name} {manifest.producer.version}{origin}")


def _fact(label: str, value: str) -> str:
    return f"  {label:<{_LABEL}}{value}"


def _split(manifest: Manifest, *, documents: int) -> str:
    parts = []
    for name, (start, stop) in (manifest.split or {}).items():
        if stop > start:
            count = round(stop * documents) - round(start * documents)
            parts.append(f"{name} {100 * (stop - start):g} % ({count:,} documents)")
    return ", ".join(parts)


def lengths(found: Inspection) -> Iterator[str]:
    """Yield the histogram of document lengths."""
    if not found.lengths:
        return
    yield ""
    yield (
        f"  document lengths: {found.shortest:,} to {found.longest:,} tokens, "
        f"median {found.median:,.0f}, mean {found.mean:,.0f}"
    )
    most = max(each.documents for each in found.lengths)
    width = len(f"{found.lengths[-1].high:,}")
    count = len(f"{most:,}")
    for each in found.lengths:
        share = each.tokens / found.tokens
        yield (
            f"  {each.low:>{width},} - {each.high:<{width},}  {each.documents:>{count},}  "
            f"{bar(each.documents / most, width=30)} {share:6.1%} of the tokens"
        )


def columns(found: Inspection) -> Iterator[str]:
    """Yield what each column holds."""
    for each in found.columns:
        yield ""
        numbers = "" if each.low is None else f", {each.low:g} to {each.high:g}"
        kind = "hashes" if each.dtype == "uint64" and not each.values else each.dtype
        yield f"  column {each.name}: {each.distinct:,} different {kind}{numbers}"
        shown = [] if each.low is not None else each.values[:_COLUMN_VALUES]
        width = max((len(printable(value.value)) for value in shown), default=0)
        for value in shown:
            share = value.tokens / max(found.tokens, 1)
            text = printable(value.value).ljust(width)
            yield f"    {text}  {value.documents:,} documents, {share:.1%} of the tokens"


def top_tokens(found: Inspection, decode: Decode | None) -> Iterator[str]:
    """Yield the most frequent tokens, several to a line."""
    if not found.top_tokens:
        return
    sampled = "" if found.counted_tokens >= found.tokens else f" of {found.counted_tokens:,} seen"
    yield ""
    yield f"  most frequent tokens{sampled}:"
    cells = [
        f"{printable(repr(decode([each.token]))) if decode else each.token} {each.share:.1%}"
        for each in found.top_tokens
    ]
    yield from textwrap.wrap("   ".join(cells), 96, initial_indent="    ", subsequent_indent="    ")


def samples(found: Inspection, decode: Decode | None) -> Iterator[str]:
    """Yield the beginnings of some documents."""
    for each in found.samples:
        yield ""
        yield f"  document {each.number:,} ({each.length:,} tokens):"
        text = decode(list(each.tokens)) if decode else " ".join(map(str, each.tokens))
        yield from textwrap.wrap(
            printable(text),
            96,
            initial_indent="    ",
            subsequent_indent="    ",
            max_lines=_SAMPLE_LINES,
            placeholder=" ...",
        )
