"""What every new store begins with: its arrays and groups, and at the end its identity and date."""

import os
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from mds_data.store.array_metadata import ArrayLayout, layout_for_documents
from mds_data.store.array_writer import Place, ShardedArrayWriter
from mds_data.store.commit import put_file
from mds_data.store.records import FileRecord
from mds_data.store.strict_json import check_relative_path

__all__ = ["new_arrays", "new_uuid", "put_groups", "timestamp"]

_GROUP = b'{\n  "zarr_format": 3,\n  "node_type": "group",\n  "attributes": {}\n}\n'
_INT64 = np.dtype("<i8")
_INT32 = np.dtype("<i4")


def put_groups(place: Place, *, columns: bool) -> dict[str, FileRecord]:
    """The zarr.json of the store's group, and of the group of columns."""
    names = ["zarr.json", "columns/zarr.json"] if columns else ["zarr.json"]
    return {name: put_file(place.file(name), _GROUP, operations=place.operations) for name in names}


def new_arrays(
    place: Place,
    *,
    tokens: ArrayLayout,
    columns: Mapping[str, np.dtype[Any] | str],
    sentences: bool,
) -> dict[str, ShardedArrayWriter]:
    """Writers for all arrays of a store."""
    documents: dict[str, np.dtype[Any]] = {"doc_start": _INT64, "doc_length": _INT64}
    if sentences:
        documents["doc_sentences"] = _INT32
    for name, dtype in columns.items():
        if "/" in check_relative_path(name, name="column"):
            raise ValueError(f"the column name {name!r} must not hold a /")
        documents[f"columns/{name}"] = np.dtype(dtype).newbyteorder("<")
    arrays = {"tokens": ShardedArrayWriter(place, "tokens", layout=tokens, dimension="token")}
    for name, kind in documents.items():
        layout = layout_for_documents(kind)
        arrays[name] = ShardedArrayWriter(place, name, layout=layout, dimension="document")
    if sentences:
        layout = layout_for_documents(_INT32)
        arrays["sentence_length"] = ShardedArrayWriter(
            place, "sentence_length", layout=layout, dimension="sentence"
        )
    return arrays


def timestamp() -> str:
    """Now, or SOURCE_DATE_EPOCH, as RFC 3339 in UTC."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    moment = datetime.fromtimestamp(int(epoch), UTC) if epoch else datetime.now(UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def new_uuid(files: Mapping[str, FileRecord]) -> str:
    """A new identity; in a reproducible build (SOURCE_DATE_EPOCH) the content decides it."""
    if "SOURCE_DATE_EPOCH" not in os.environ:
        return str(uuid.uuid4())
    content = "\n".join(f"{path} {record.sha256}" for path, record in sorted(files.items()))
    return str(uuid.uuid5(uuid.NAMESPACE_OID, content))
