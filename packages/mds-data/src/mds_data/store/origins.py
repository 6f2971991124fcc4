"""What the manifests of a store and of the stores merged into it tell of their inputs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mds_data.errors import StoreError
from mds_data.store.folder import read_manifest
from mds_data.store.records import Manifest
from mds_data.store.token_store import TokenStore

__all__ = ["kept_inputs", "manifests_within"]

_DEEPEST = 32


def manifests_within(
    root: Path, manifest: Manifest, *, depth: int = 0
) -> Iterator[tuple[Path, Manifest]]:
    """Iterate over a store and all segments in it, each with its folder.

    Raises:
        StoreError: Segments lie deeper in one another than any merge of ours lays them.
    """
    if depth > _DEEPEST:
        raise StoreError(f"{root}: segments lie more than {_DEEPEST} deep; merge the stores anew")
    yield root, manifest
    for segment in manifest.segments:
        inner = read_manifest(root / segment.path)[0]
        yield from manifests_within(root / segment.path, inner, depth=depth + 1)


def kept_inputs(store: TokenStore) -> dict[str, Any]:
    """The provenance of a store for one that is copied from it, segments' inputs taken in."""
    manifest = store.manifest
    if not manifest.segments:
        return dict(manifest.provenance)
    known = [manifest.provenance, *(part.manifest.provenance for part in store.parts)]
    inputs = [record for provenance in known for record in provenance.get("inputs") or ()]
    return {**manifest.provenance, **({"inputs": inputs} if inputs else {})}
