"""Columns of a store whose values stand for texts: codes in the array, texts in its attributes.

A code is a hash of its text, so the same text has the same code in every store: stores can be
merged and written by many hands without agreeing on numbers first.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from mds_data.errors import ManifestError
from mds_data.store.token_store import StorePart, TokenStore

__all__ = ["attributes_in", "check_labels", "column_labels", "label_attributes", "text_code"]

_MOST = 10_000
_LONGEST = 256
_MEMBER = "labels"


def text_code(text: str) -> int:
    """The 64 bits by which a text is known in a column; 0 stands for no text."""
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1


def label_attributes(labels: Iterable[str]) -> dict[str, Any]:
    """Attributes of a column's array that tell its texts."""
    return {"code": "blake2b-64-little", _MEMBER: sorted(labels)}


def check_labels(name: str, labels: Iterable[str]) -> None:
    """Raise ValueError if a column has too many texts, or too long ones, to be categories."""
    known = set(labels)
    long = next((label for label in known if len(label) > _LONGEST), None)
    if long is not None:
        raise ValueError(
            f"the column {name!r} holds the text {long[:40]!r}... of {len(long)} characters, too "
            f"long for a category; keep {name}:hash instead"
        )
    if len(known) > _MOST:
        raise ValueError(
            f"the column {name!r} holds more than {_MOST:,} different texts, too many for "
            f"categories; keep {name}:hash instead"
        )


def column_labels(store: TokenStore, name: str) -> dict[int, str]:
    """The texts that a column's codes stand for; empty for numbers and hashes.

    Args:
        store: An open store.
        name: One of ``store.columns``.
    """
    found: set[str] = set()
    for part in store.parts:
        read = part.folder.read if isinstance(part, StorePart) else getattr(part, "read_file", None)
        if read is not None:
            path = f"columns/{name}/zarr.json"
            found |= set(labels_in(read(path), name=f"{part.root}/{path}"))
    return {text_code(label): label for label in sorted(found)}


def labels_in(metadata: bytes, *, name: str) -> list[str]:
    """The texts in the attributes of a column's zarr.json."""
    labels = attributes_in(metadata, name=name).get(_MEMBER, [])
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise ManifestError(f"{name}: {_MEMBER} must be a list of texts")
    return labels


def attributes_in(metadata: bytes, *, name: str) -> dict[str, Any]:
    """The attributes in an array's zarr.json, which was checked before."""
    attributes = json.loads(metadata).get("attributes", {})
    if not isinstance(attributes, dict):
        raise ManifestError(f"{name}: attributes must be an object")
    return attributes
