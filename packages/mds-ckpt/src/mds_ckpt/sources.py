"""The datasets that a checkpoint's weights have seen, with sources and licences, as it tells them.

Everything is embedded in the manifest when a checkpoint is saved: the datasets need not be there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mds_ckpt.checkpoint import Checkpoint

__all__ = ["recorded_sources", "source_lines"]

SCHEMA = "mds-ckpt/sources/1"
_TEXTS = ("path", "use", "uuid", "manifest_sha256")
_COUNTS = ("revision", "documents", "tokens", "erased_documents")


def recorded_sources(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return datasets, parent and software of a checkpoint, as JSON can hold it.

    ``datasets`` are those of the run that wrote it, ``earlier_datasets`` those of the checkpoints
    from which that run started. Members of other types than they should have are left out.
    """
    manifest = checkpoint.manifest
    provenance = {} if manifest is None else manifest.provenance
    return {
        "schema": SCHEMA,
        "path": str(checkpoint.path),
        "uuid": None if manifest is None else manifest.uuid,
        "parent": None if manifest is None or manifest.parent is None else dict(manifest.parent),
        "packages": dict(_object(provenance.get("packages"))),
        "datasets": [_dataset(each) for each in _objects(provenance.get("datasets"))],
        "earlier_datasets": [
            _dataset(each) for each in _objects(provenance.get("earlier_datasets"))
        ],
    }


def source_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what `recorded_sources` found as lines for people."""
    yield str(found["path"])
    for title in ("datasets", "earlier_datasets"):
        for dataset in found[title]:
            yield from _dataset_lines(dataset, earlier=title != "datasets")
    if not found["datasets"] and not found["earlier_datasets"]:
        yield "  names no dataset: it was made by another tool, or before datasets were recorded"
    if found["parent"]:
        yield f"  parent {found['parent'].get('path')} ({found['parent'].get('uuid')})"
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    if packages:
        yield f"  made with {packages}"


def _dataset_lines(dataset: Mapping[str, Any], *, earlier: bool) -> Iterator[str]:
    when = "earlier " if earlier else ""
    erased = dataset.get("erased_documents", 0)
    gone = f", {erased:,} erased" if erased else ""
    yield (
        f"  {when}{dataset.get('use', 'training')} {dataset.get('path', '?')}: "
        f"{dataset.get('documents', 0):,} documents{gone}, {dataset.get('tokens', 0):,} tokens, "
        f"revision {dataset.get('revision', '?')}, "
        f"manifest {dataset.get('manifest_sha256', 'unknown')[:12]}"
    )
    wide = max((len(each.get("licence", "unknown")) for each in dataset["sources"]), default=0)
    for each in dataset["sources"]:
        terms = f"; {each['terms']}" if "terms" in each else ""
        licence = each.get("licence", "unknown").ljust(wide)
        yield f"    {licence}  {each.get('source', '?')} ({each.get('files', 0):,} files{terms})"


def _dataset(record: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {key: record[key] for key in _TEXTS if isinstance(record.get(key), str)}
    kept |= {key: record[key] for key in _COUNTS if type(record.get(key)) is int}
    return {**kept, "sources": [_source(each) for each in _objects(record.get("sources"))]}


def _source(record: Mapping[str, Any]) -> dict[str, Any]:
    texts = ("source", "licence", "terms")
    kept: dict[str, Any] = {key: record[key] for key in texts if isinstance(record.get(key), str)}
    return kept | {key: record[key] for key in ("files", "bytes") if type(record.get(key)) is int}


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _objects(value: object) -> Iterator[Mapping[str, Any]]:
    for each in value if isinstance(value, list | tuple) else ():
        if isinstance(each, Mapping):
            yield each
