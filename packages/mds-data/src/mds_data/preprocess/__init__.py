"""Turn text into token stores: read JSON lines or text, encode, commit a store."""

from mds_data.preprocess.inputs import InputError
from mds_data.preprocess.pipeline import PreprocessConfig, Progress, SentenceConfig, preprocess
from mds_data.preprocess.report import PreprocessReport

__all__ = [
    "InputError",
    "PreprocessConfig",
    "PreprocessReport",
    "Progress",
    "SentenceConfig",
    "preprocess",
]
