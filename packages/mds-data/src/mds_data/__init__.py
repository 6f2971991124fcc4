"""Token datasets on Zarr at the speed of a raw memory map."""

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
from mds_data.records import Manifest
from mds_data.sampling.sampler import ResumableSampler
from mds_data.store import TokenStore, open_store
from mds_data.writer import StoreWriter, TokenizerFile, write_store

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
