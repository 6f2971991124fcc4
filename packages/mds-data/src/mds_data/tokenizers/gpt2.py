"""GPT-2's byte-level BPE from its vocabulary and merges, as Megatron's GPT2BPETokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mds_data.tokenizers.json_file import JsonTokenizer
from mds_data.tokenizers.limits import check_ids, is_panic
from mds_data.tokenizers.protocol import TokenizerError, read_model_file

__all__ = ["load_gpt2_tokenizer"]


def load_gpt2_tokenizer(
    vocab: Path, *, merges: Path, eod_token: str | None = None, allow_special: bool = False
) -> JsonTokenizer:
    """Load GPT-2 BPE; the ids equal those of Megatron's GPT2BPETokenizer.

    Args:
        vocab: ``vocab.json``, token to id.
        merges: ``merges.txt``, one merge a line.
        eod_token: Token that ends a document, ``<|endoftext|>`` when left out.
        allow_special: Let the spelling of that token in a text become the token.

    Raises:
        TokenizerError: A file is broken, or they don't belong together.
    """
    backend = tokenizers.Tokenizer(_model(vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    eod_token = eod_token or "<|endoftext|>"
    if backend.token_to_id(eod_token) is None:
        raise TokenizerError(
            f"{vocab} has no token {eod_token!r} to end a document with; "
            f"name another by --eod-token."
        )
    backend.add_special_tokens([eod_token])
    return JsonTokenizer(
        backend,
        content=backend.to_str().encode(),
        name="GPT2BPETokenizer",
        eod_token=eod_token,
        allow_special=allow_special,
    )


def _model(vocab: Path, *, merges: Path) -> models.BPE:
    try:
        return models.BPE(vocab=_read_vocabulary(vocab), merges=_read_merges(merges))
    except TokenizerError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise TokenizerError(f"{vocab} and {merges} don't make a BPE model: {error}") from error


def _read_vocabulary(path: Path) -> dict[str, int]:
    try:
        vocabulary = json.loads(read_model_file(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not a GPT-2 vocabulary (JSON): {error}") from error
    if not isinstance(vocabulary, dict) or not all(
        type(i) is int and i >= 0 for i in vocabulary.values()
    ):
        raise TokenizerError(
            f"{path} is not a GPT-2 vocabulary: it must map each token to a number."
        )
    check_ids(vocabulary.values(), count=len(vocabulary), path=path)
    return vocabulary


def _read_merges(path: Path) -> list[tuple[str, str]]:
    try:
        lines = read_model_file(path).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8 text: {error}") from error
    merges = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        left, separator, right = line.rstrip("\r").partition(" ")
        if not (left and separator and right) or " " in right:
            raise TokenizerError(
                f"{path}, line {number}: a merge is two tokens with one space between: {line!r}."
            )
        merges.append((left, right))
    return merges
