"""Errors that this package raises on purpose; the command line turns each into one sentence.

DataError                      input that we reject (a ValueError)
├── StoreError                 a store that can't be opened, written or trusted
│   ├── ManifestError          manifest.json or zarr.json breaks the format, or needs a newer reader
│   ├── DamagedError           a file is missing, cut, foreign, or a checksum differs
│   ├── SealedError            an encrypted file or key that does not open
│   └── LockedError            another writer holds the store
└── IndexedDatasetError        a Megatron .bin/.idx pair that can't be what it claims to be
"""

__all__ = [
    "DamagedError",
    "DataError",
    "IndexedDatasetError",
    "LockedError",
    "ManifestError",
    "SealedError",
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


class SealedError(StoreError):
    """Something encrypted does not open: a wrong key, or bytes that were changed.

    Args:
        place: The file, folder or key.
        reason: What is wrong with it.
        remedy: What the user can do.
    """

    def __init__(self, place: str, reason: str, *, remedy: str) -> None:
        self.place, self.reason, self.remedy = place, reason, remedy
        super().__init__(f"{place}: {reason}; {remedy}")

    def __reduce__(self) -> tuple[object, ...]:
        return _sealed_error, (self.place, self.reason, self.remedy)


def _sealed_error(place: str, reason: str, remedy: str) -> SealedError:
    return SealedError(place, reason, remedy=remedy)


class LockedError(StoreError):
    """Another writer holds the store."""


class IndexedDatasetError(DataError):
    """A Megatron ``.bin``/``.idx`` pair is not what it claims to be."""
