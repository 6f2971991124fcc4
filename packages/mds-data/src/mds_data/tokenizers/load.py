"""From a description to a tokenizer; each library is imported only when its kind is loaded."""

from __future__ import annotations

import json
from pathlib import Path

from mds_data.tokenizers.null import NullTokenizer
from mds_data.tokenizers.protocol import (
    Tokenizer,
    TokenizerError,
    TokenizerSpec,
    read_model_file,
)

__all__ = ["load_tokenizer", "spec_of_file", "spec_of_store_file"]


def load_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """Load the tokenizer that a spec describes.

    Raises:
        TokenizerError: Its file is not what the spec says.
        FileNotFoundError: Its file is not there.
    """
    if spec.vocab_size is not None and spec.kind == "null":
        return NullTokenizer(spec.vocab_size)
    if spec.path is None:
        raise TokenizerError(f"a {spec.kind} tokenizer needs its file.")
    if spec.kind in {"sentencepiece", "sentencepiece-megatron"}:
        from mds_data.tokenizers.sentencepiece import load_sentencepiece_tokenizer

        return load_sentencepiece_tokenizer(
            spec.path,
            megatron_tokens=spec.kind == "sentencepiece-megatron",
            eod_token=spec.eod_token,
            extra_ids=spec.extra_ids,
            allow_special=spec.allow_special,
        )
    return _load_with_tokenizers_library(spec, path=spec.path)


def _load_with_tokenizers_library(spec: TokenizerSpec, *, path: Path) -> Tokenizer:
    if spec.kind == "gpt2-bpe" and spec.merges is not None:
        from mds_data.tokenizers.gpt2 import load_gpt2_tokenizer

        return load_gpt2_tokenizer(
            path, merges=spec.merges, eod_token=spec.eod_token, allow_special=spec.allow_special
        )
    if spec.kind == "bert-wordpiece":
        from mds_data.tokenizers.bert import load_bert_tokenizer

        return load_bert_tokenizer(
            path,
            lower_case=spec.lower_case,
            eod_token=spec.eod_token,
            extra_ids=spec.extra_ids,
            allow_special=spec.allow_special,
        )
    from mds_data.tokenizers.json_file import load_json_tokenizer

    return load_json_tokenizer(path, eod_token=spec.eod_token, allow_special=spec.allow_special)


def spec_of_file(
    path: Path, *, eod_token: str | None = None, allow_special: bool = False
) -> TokenizerSpec:
    """Describe the tokenizer in a file or folder: JSON, or a SentencePiece model by its suffix.

    Raises:
        FileNotFoundError: There is no such file, or the folder holds neither.
    """
    if path.is_dir():
        found = [path / name for name in ("tokenizer.json", "tokenizer.model")]
        path = next((each for each in found if each.is_file()), found[0])
    return TokenizerSpec(
        # Some models have a version at the end: tokenizer.model.v3.
        kind="sentencepiece" if {".model", ".spm"} & set(path.suffixes) else "tokenizers-json",
        path=path,
        eod_token=eod_token,
        allow_special=allow_special,
    )


def spec_of_store_file(path: Path, *, kind: str) -> TokenizerSpec:
    """Describe the tokenizer that a store keeps, by the kind that its manifest names.

    Raises:
        TokenizerError: The kind is not known here, or a null tokenizer's file is broken.
    """
    if kind == "null":
        return TokenizerSpec(kind="null", vocab_size=_null_vocab_size(path))
    for known in ("tokenizers-json", "sentencepiece", "sentencepiece-megatron"):
        if kind == known:
            return TokenizerSpec(kind=known, path=path)
    raise TokenizerError(f"{path}: a tokenizer of kind {kind!r} is not known to this version.")


def _null_vocab_size(path: Path) -> int:
    try:
        return int(json.loads(read_model_file(path))["vocab_size"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TokenizerError(f"{path} does not describe a null tokenizer.") from error
