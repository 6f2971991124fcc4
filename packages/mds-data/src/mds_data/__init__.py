"""Token datasets on Zarr at the speed of a raw memory map."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mds_data.datasets.blended import BlendedDataset
    from mds_data.datasets.gpt import GPTDataset
    from mds_data.errors import (
        DamagedError,
        DataError,
        IndexedDatasetError,
        LockedError,
        ManifestError,
        StoreError,
    )
    from mds_data.sampling.sampler import ResumableSampler
    from mds_data.store.records import Manifest
    from mds_data.store.token_store import TokenStore, open_store
    from mds_data.store.writer import StoreWriter, TokenizerFile, write_store

__all__ = [
    "BlendedDataset",
    "DamagedError",
    "DataError",
    "GPTDataset",
    "IndexedDatasetError",
    "LockedError",
    "Manifest",
    "ManifestError",
    "ResumableSampler",
    "StoreError",
    "StoreWriter",
    "TokenStore",
    "TokenizerFile",
    "open_store",
    "write_store",
]

# numpy and zarr take a third of a second to import; `mds-data --help` is spared them.
_HOMES = {
    "BlendedDataset": "datasets.blended",
    "GPTDataset": "datasets.gpt",
    "Manifest": "store.records",
    "ResumableSampler": "sampling.sampler",
    "StoreWriter": "store.writer",
    "TokenStore": "store.token_store",
    "TokenizerFile": "store.writer",
    "open_store": "store.token_store",
    "write_store": "store.writer",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
