"""Errors that this package raises on purpose; the command line turns each into one sentence.

DataError                      input that we reject (a ValueError)
├── StoreError                 a store that can't be opened, written or trusted
│   ├── ManifestError          manifest.json or zarr.json breaks the format, or needs a newer reader
│   ├── DamagedError           a file is missing, cut, foreign, or a checksum differs
│   └── LockedError            another writer holds the store
└── IndexedDatasetError        a Megatron .bin/.idx pair that can't be what it claims to be
"""

__all__ = [
    "DamagedError",
    "DataError",
    "IndexedDatasetError",
    "LockedError",
    "ManifestError",
    "StoreError",
]


class DataError(ValueError):
    """Input that was rejected; the message names file, reason and remedy."""


class StoreError(DataError):
    """A token store can't be opened, written or trusted."""


class ManifestError(StoreError):
    """A metadata file of the store breaks the format or needs a newer reader."""


class DamagedError(StoreError):
    """A file of the store is missing, cut, foreign, or its checksum differs."""


class LockedError(StoreError):
    """Another writer holds the store."""


class IndexedDatasetError(DataError):
    """A Megatron ``.bin``/``.idx`` pair is not what it claims to be."""
