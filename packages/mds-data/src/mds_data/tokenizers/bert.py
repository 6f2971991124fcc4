"""BERT's WordPiece from its vocabulary file, as Megatron's BertWordPiece tokenizers read it."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from mds_data.tokenizers.json_file import JsonTokenizer
from mds_data.tokenizers.protocol import TokenizerError, read_model_file

__all__ = ["load_bert_tokenizer"]

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_LONGEST_WORD = 200
"""Characters; a longer word becomes [UNK]. Google's 200, where the tokenizers library has 100."""


def load_bert_tokenizer(
    vocab: Path,
    *,
    lower_case: bool,
    eod_token: str | None = None,
    extra_ids: int = 0,
    allow_special: bool = False,
) -> JsonTokenizer:
    """Load BERT WordPiece. Like Megatron's, it adds ``[BOS]`` and ``[EOS]`` after the vocabulary.

    Args:
        vocab: ``vocab.txt``, one token a line.
        lower_case: Lower the case and strip accents (uncased models).
        eod_token: Token that ends a document; none when left out.
        extra_ids: Number of T5's sentinels ``<extra_id_0>``... to add.
        allow_special: Let the spelling of a special token in a text become that token.

    Raises:
        TokenizerError: The file is not a BERT vocabulary.
    """
    backend = tokenizers.Tokenizer(
        models.WordPiece(
            _read_vocabulary(vocab), unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD
        )
    )
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(
        [*_SPECIAL, "[BOS]", "[EOS]", *(f"<extra_id_{i}>" for i in range(extra_ids))]
    )
    return JsonTokenizer(
        backend,
        content=backend.to_str().encode(),
        name="BertWordPieceLowerCase" if lower_case else "BertWordPieceCase",
        eod_token=eod_token,
        allow_special=allow_special,
    )


def _read_vocabulary(path: Path) -> dict[str, int]:
    try:
        lines = read_model_file(path).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8 text: {error}") from error
    if lines and not lines[-1]:
        lines.pop()
    # A token that stands twice keeps its last number, as in Google's reader.
    vocabulary = {line.strip(): number for number, line in enumerate(lines)}
    missing = [token for token in _SPECIAL if token not in vocabulary]
    if missing:
        raise TokenizerError(
            f"{path} is not a BERT vocabulary: {', '.join(missing)} must stand in it, "
            f"one token a line."
        )
    return vocabulary
