"""Token datasets on Zarr at the speed of a raw memory map."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mds_data.datasets.bert import BertDataset
    from mds_data.datasets.blended import BlendedDataset
    from mds_data.datasets.curriculum import LengthCurriculum
    from mds_data.datasets.fim import FillInTheMiddle
    from mds_data.datasets.gpt import GPTDataset
    from mds_data.datasets.gpt_blend import gpt_datasets
    from mds_data.datasets.masking import MaskingStyle
    from mds_data.datasets.pairs import NMTDataset
    from mds_data.datasets.sft import SFTDataset
    from mds_data.datasets.t5 import T5Dataset
    from mds_data.difficulty.analysis import analyze
    from mds_data.difficulty.index import open_index
    from mds_data.encryption.keys import KeySource
    from mds_data.errors import (
        DamagedError,
        DataError,
        IndexedDatasetError,
        LockedError,
        ManifestError,
        SealedError,
        StoreError,
    )
    from mds_data.sampling.curriculum import CurriculumOrder, Difficulty
    from mds_data.sampling.pacing import DiscretePacing, RootPacing
    from mds_data.sampling.sampler import ResumableSampler
    from mds_data.store.records import Manifest
    from mds_data.store.token_store import TokenStore, open_store
    from mds_data.store.writer import StoreWriter, TokenizerFile, write_store
    from mds_data.tokenizers.vocabulary import Vocabulary

__all__ = [
    "BertDataset",
    "BlendedDataset",
    "CurriculumOrder",
    "DamagedError",
    "DataError",
    "Difficulty",
    "DiscretePacing",
    "FillInTheMiddle",
    "GPTDataset",
    "IndexedDatasetError",
    "KeySource",
    "LengthCurriculum",
    "LockedError",
    "Manifest",
    "ManifestError",
    "MaskingStyle",
    "NMTDataset",
    "ResumableSampler",
    "RootPacing",
    "SFTDataset",
    "SealedError",
    "StoreError",
    "StoreWriter",
    "T5Dataset",
    "TokenStore",
    "TokenizerFile",
    "Vocabulary",
    "analyze",
    "gpt_datasets",
    "open_index",
    "open_store",
    "write_store",
]

# numpy and zarr take a third of a second to import; `mds-data --help` is spared them.
_HOMES = {
    "BertDataset": "datasets.bert",
    "BlendedDataset": "datasets.blended",
    "CurriculumOrder": "sampling.curriculum",
    "Difficulty": "sampling.curriculum",
    "DiscretePacing": "sampling.pacing",
    "FillInTheMiddle": "datasets.fim",
    "GPTDataset": "datasets.gpt",
    "KeySource": "encryption.keys",
    "LengthCurriculum": "datasets.curriculum",
    "Manifest": "store.records",
    "MaskingStyle": "datasets.masking",
    "NMTDataset": "datasets.pairs",
    "ResumableSampler": "sampling.sampler",
    "RootPacing": "sampling.pacing",
    "SFTDataset": "datasets.sft",
    "StoreWriter": "store.writer",
    "T5Dataset": "datasets.t5",
    "TokenStore": "store.token_store",
    "TokenizerFile": "store.writer",
    "Vocabulary": "tokenizers.vocabulary",
    "analyze": "difficulty.analysis",
    "gpt_datasets": "datasets.gpt_blend",
    "open_index": "difficulty.index",
    "open_store": "store.token_store",
    "write_store": "store.writer",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
