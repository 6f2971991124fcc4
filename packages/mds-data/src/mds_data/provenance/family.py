"""The sources of a store, grouped: what came from one place under one licence is one family."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mds_data.errors import StoreError
from mds_data.provenance.licence import LicencePolicy
from mds_data.store.origins import manifests_within
from mds_data.store.records import Manifest

__all__ = ["Family", "families_of", "store_families"]

_DEEPEST = 32
_MOST = 1000
"""Families a store; where each file is one and there are more, each folder is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Files from one place under one licence."""

    source: str
    """Its URL, or the path of the file or folder."""
    licence: str | None
    terms: str | None = None
    files: int = 1
    bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return it for a manifest; what is not known is left out."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    def fault(self, policy: LicencePolicy) -> str | None:
        """Return why a policy refuses it, or None."""
        return policy.fault(self.licence)


def store_families(root: Path, manifest: Manifest) -> list[Family]:
    """Return the families of a store and of the stores merged into it.

    Args:
        root: The store's folder.
        manifest: Its manifest.

    Raises:
        StoreError: Segments or origins are nested deeper than any tool of ours nests them.
    """
    found: list[Family] = []
    for place, each in manifests_within(root, manifest):
        inner = families_of(each.provenance, name=str(place))
        silent = not inner and not each.segments and not families_of(manifest.provenance, name="")
        found += [Family(source=str(place), licence=None, files=0)] if silent else inner
    return _joined(found)


def families_of(provenance: Mapping[str, Any], *, name: str) -> list[Family]:
    """Return the families that the provenance of one manifest tells."""
    leaves = list(_leaves(provenance.get("inputs"), inherited={}, name=name, depth=0))
    families = _joined(_family(each) for each in leaves)
    if len(families) <= _MOST:
        return families
    return _joined(_family(each, by_folder=True) for each in leaves)


def _leaves(
    inputs: object, *, inherited: Mapping[str, Any], name: str, depth: int
) -> Iterator[dict[str, Any]]:
    """Iterate over the first files; what is said of a filtered one holds where they say nothing."""
    if depth > _DEEPEST:
        raise StoreError(f"{name}: origins of inputs are nested more than {_DEEPEST} deep")
    for each in inputs if isinstance(inputs, list) else ():
        if not isinstance(each, dict):
            continue
        facts = {
            **inherited,
            **{key: each[key] for key in _FACTS if isinstance(each.get(key), str)},
        }
        origin = each.get("origin")
        if not isinstance(origin, dict):
            yield {**each, **facts}
        elif origin.get("sha256") == each.get("sha256"):
            yield from _leaves(origin.get("inputs"), inherited=facts, name=name, depth=depth + 1)
        else:  # The record beside the file was of other bytes: nothing is known of these.
            yield {key: value for key, value in each.items() if key not in _FACTS}


_FACTS = ("licence", "url", "terms", "retrieved")


def _family(record: Mapping[str, Any], *, by_folder: bool = False) -> Family:
    path = str(record.get("path", "unknown"))
    url, size = record.get("url"), record.get("size")
    place = str(Path(path).parent) if by_folder else path
    return Family(
        source=url if isinstance(url, str) else place,
        licence=record.get("licence"),
        terms=record.get("terms"),
        bytes=size if isinstance(size, int) else 0,
    )


def _joined(families: Iterable[Family]) -> list[Family]:
    """Add up what is from one place under one licence, in the order of first sight."""
    found: dict[tuple[str, str | None, str | None], Family] = {}
    for each in families:
        key = (each.source, each.licence, each.terms)
        known = found.get(key, Family(source=each.source, licence=None, files=0))
        found[key] = Family(
            source=each.source,
            licence=each.licence,
            terms=each.terms,
            files=known.files + each.files,
            bytes=known.bytes + each.bytes,
        )
    return list(found.values())
