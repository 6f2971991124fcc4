"""Continues texts with a trained model: loading, decoding, sampling."""

from mds_train.generate.decoding import generate
from mds_train.generate.model import find_checkpoint, load_model, load_tokenizer
from mds_train.generate.sampling import Sampling, next_tokens

__all__ = [
    "Sampling",
    "find_checkpoint",
    "generate",
    "load_model",
    "load_tokenizer",
    "next_tokens",
]
