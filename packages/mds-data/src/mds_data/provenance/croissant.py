"""A store described as Croissant 1.1 (JSON-LD of MLCommons): files, digests, licences, sources.

Croissant's readers know no Zarr, so there are no record sets: what the arrays hold is said in
words, and the files are named with their digests.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mds_data.provenance.family import Family
from mds_data.store.schema import MANIFEST_NAME, Manifest

__all__ = ["croissant"]

_CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "containedIn": "cr:containedIn",
    "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "equivalentProperty": "cr:equivalentProperty",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileObject": "cr:fileObject",
    "fileProperty": "cr:fileProperty",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "prov": "http://www.w3.org/ns/prov#",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}


def croissant(
    root: Path, manifest: Manifest, *, families: list[Family], data: bytes
) -> dict[str, Any]:
    """Return the description of a store.

    Args:
        root: The store's folder; its name becomes the dataset's.
        manifest: Its manifest.
        families: Its sources.
        data: The manifest's bytes.
    """
    described: dict[str, Any] = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.1",
        "name": root.resolve().name,
        "description": _in_words(manifest),
        "url": f"urn:uuid:{manifest.uuid}",
        "version": f"{manifest.revision}.0.0",
        "distribution": _files(manifest, data),
    }
    if manifest.created is not None:
        described |= {"dateCreated": manifest.created, "datePublished": manifest.created[:10]}
    return described | _origin(manifest, families)


def _in_words(manifest: Manifest) -> str:
    counts = manifest.counts
    return (
        f"A tokenised text dataset: {counts.documents:,} documents, {counts.tokens:,} tokens "
        f"of a vocabulary of {manifest.vocab_size:,}, as a Zarr v3 group whose manifest.json "
        f"names every file with its SHA-256."
    )


def _files(manifest: Manifest, data: bytes) -> list[dict[str, str]]:
    """The manifest, and every file that it names."""
    itself = _file(MANIFEST_NAME, size=len(data), sha256=hashlib.sha256(data).hexdigest())
    return [
        itself,
        *(
            _file(path, size=record.size, sha256=record.sha256)
            for path, record in manifest.files.items()
        ),
    ]


def _file(path: str, *, size: int, sha256: str) -> dict[str, str]:
    return {
        "@type": "cr:FileObject",
        "@id": path,
        "name": path,
        "contentUrl": quote(path),
        "contentSize": f"{size} B",
        "encodingFormat": _kind(path),
        "sha256": sha256,
    }


def _origin(manifest: Manifest, families: list[Family]) -> dict[str, Any]:
    """Licences, sources, what was done to them and what was erased, as far as it is known."""
    told: dict[str, Any] = {}
    if licences := sorted({each.licence for each in families if each.licence}):
        told["license"] = [_licence(each) for each in licences]
    if families:
        told["prov:wasDerivedFrom"] = [_source(each) for each in families]
    if steps := [_step(each) for each in manifest.provenance.get("transforms", ())]:
        told["rai:dataPreprocessingProtocol"] = steps
    if manifest.erasures:
        erased = sum(len(each.documents) for each in manifest.erasures)
        told["rai:dataReleaseMaintenancePlan"] = (
            f"{erased} documents were erased on request; this is revision {manifest.revision}."
        )
    return told


def _licence(expression: str) -> str:
    """The page of a licence, which the format recommends; a compound expression as it is."""
    plain = " " not in expression and not expression.startswith("LicenseRef")
    return f"https://spdx.org/licenses/{expression}.html" if plain else expression


def _kind(path: str) -> str:
    return "application/json" if path.endswith(".json") else "application/octet-stream"


def _source(family: Family) -> dict[str, Any]:
    entity = {"@type": "prov:Entity", "name": family.source}
    if "://" in family.source:
        entity["url"] = family.source
    if family.licence:
        entity["license"] = family.licence
    if family.terms:
        entity["usageInfo"] = family.terms
    return entity


def _step(transform: object) -> str:
    if not isinstance(transform, dict):
        return str(transform)[:200]
    name, version = transform.get("name", "unknown"), transform.get("version")
    redacted = " with private data replaced" if transform.get("redaction") else ""
    return f"{name}{redacted}" + (f" (mds-data {version})" if version else "")
