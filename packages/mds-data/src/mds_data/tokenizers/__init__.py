"""Tokenizers behind one protocol: Hugging Face JSON, GPT-2, BERT WordPiece, SentencePiece, null.

Importing this package loads no tokenizer library; loading a tokenizer loads the one it needs.
"""

from mds_data.tokenizers.load import load_tokenizer, spec_of_file, spec_of_store_file
from mds_data.tokenizers.protocol import (
    ModelFile,
    Tokenizer,
    TokenizerError,
    TokenizerSpec,
)

__all__ = [
    "ModelFile",
    "Tokenizer",
    "TokenizerError",
    "TokenizerSpec",
    "load_tokenizer",
    "spec_of_file",
    "spec_of_store_file",
]
