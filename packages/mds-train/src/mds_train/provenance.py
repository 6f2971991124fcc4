"""What a checkpoint tells of its making: the datasets with their licences, and the software."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mds_data import TokenStore
from mds_data.provenance.family import families_of, store_families
from mds_data.store.schema import manifest_to_json
from mds_train.assembly import Parts

__all__ = ["dataset_records", "described_parent", "provenance_record"]

_PACKAGES = (
    *("mds-train", "mds-parallel-core", "mds-kernels", "mds-data", "mds-ckpt"),
    *("torch", "deepspeed", "numpy"),
)


def provenance_record(parts: Parts, *, parent: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the provenance of a checkpoint.

    Args:
        parts: The run.
        parent: What `described_parent` told of the checkpoint that the run started from.
    """
    datasets = list(dataset_records(parts))
    here = {_identity(each) for each in datasets}
    before = (parent or {}).get("datasets") or ()
    earlier = {_identity(each): dict(each) for each in before if _identity(each) not in here}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "datasets": datasets,
        "earlier_datasets": list(earlier.values()),
    }


def described_parent(path: Path, uuid: str, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return path and uuid of a checkpoint, and all datasets that its weights have seen."""
    seen = [*_listed(provenance.get("datasets")), *_listed(provenance.get("earlier_datasets"))]
    return {"path": str(path), "uuid": uuid, "datasets": seen}


def dataset_records(parts: Parts) -> Iterator[dict[str, Any]]:
    """Iterate over what is known of each store of a run."""
    data, stores = parts.config.data, parts.stores
    named: Sequence[tuple[str, TokenStore, str]] = [
        *(
            (path, store, "training")
            for path, store in zip(data.paths, stores.training, strict=True)
        ),
        *(
            (path, store, "validation")
            for path, store in zip(data.valid_stores, stores.validation, strict=True)
        ),
    ]
    for path, store, use in named:
        yield _record(path, store, use)


def _record(path: str, store: TokenStore, use: str) -> dict[str, Any]:
    manifest = store.manifest
    if "://" in path:  # in object storage, where what was merged into it would have to be fetched
        families = families_of(manifest.provenance, name=path)
    else:
        families = store_families(Path(path), manifest)
    return {
        "path": path,
        "use": use,
        "uuid": manifest.uuid,
        "revision": manifest.revision,
        "manifest_sha256": hashlib.sha256(manifest_to_json(manifest)).hexdigest(),
        "documents": manifest.counts.documents,
        "tokens": manifest.counts.tokens,
        "erased_documents": sum(len(each.documents) for each in manifest.erasures),
        "tokenizer_sha256": manifest.tokenizer.sha256 if manifest.tokenizer else None,
        "licences": sorted({each.licence or "unknown" for each in families}),
        "sources": [each.as_json() for each in families],
    }


def _identity(record: Mapping[str, Any]) -> tuple[object, object, object]:
    return record.get("uuid"), record.get("revision"), record.get("use")


def _listed(value: object) -> list[dict[str, Any]]:
    """The objects in what should be a list of objects."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
