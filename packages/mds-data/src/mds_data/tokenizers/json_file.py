"""Tokenizers of the Hugging Face ``tokenizers`` library, which keeps each in one JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from mds_data.tokenizers.limits import check_json_tokenizer, is_panic
from mds_data.tokenizers.protocol import ModelFile, TokenIds, TokenizerError, read_model_file
from mds_data.tokenizers.word_cache import word_cache_for

__all__ = ["JsonTokenizer", "load_json_tokenizer"]

# In this order; the first that the vocabulary holds ends a document.
_USUAL_EOD_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<eod>",
    "<EOD>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
)


class JsonTokenizer:
    """A ``tokenizers.Tokenizer`` that treats text as text and adds nothing of its own."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        content: bytes,
        name: str,
        eod_token: str | None,
        allow_special: bool = False,
        splits_at_words: bool = True,
    ) -> None:
        self._backend = backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.kind = "tokenizers-json"
        self.name = name
        self.file = ModelFile("tokenizer.json", content)
        self.fingerprint = self.file.sha256
        self.splits_at_words = splits_at_words
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.eod_id = _eod_id(vocabulary, eod_token=eod_token, where=name)
        if eod_token is not None:
            # A token that the file lists as ordinary must not be reachable from text either.
            backend.add_special_tokens([eod_token])
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = not allow_special
        description = json.loads(backend.to_str())
        self._words = None if allow_special else word_cache_for(description, backend=backend)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text; ValueError if one can't be encoded."""
        return [ids if isinstance(ids, list) else ids.tolist() for ids in self.encode_ids(texts)]

    def encode_ids(self, texts: Sequence[str]) -> Sequence[TokenIds]:
        """Return the same in the form that costs least."""
        try:
            if self._words is not None:
                return self._words.encode_arrays(texts)
            # The fast variant leaves out offsets, which nobody asks for here.
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            raise ValueError(f"the tokenizer refused a text: {error}") from error
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens in their spelling."""
        text: str = self._backend.decode([int(i) for i in ids], skip_special_tokens=False)
        return text

    def pieces(self) -> list[str]:
        """Return the spelling of every id."""
        spelled = [""] * self.vocab_size
        for token, number in self._backend.get_vocab(with_added_tokens=True).items():
            spelled[number] = token
        return spelled

    def special_ids(self) -> dict[str, int]:
        """Return the ids of the tokens that the file calls special, by spelling."""
        added = self._backend.get_added_tokens_decoder().items()
        return {token.content: number for number, token in added if token.special}


def load_json_tokenizer(
    path: Path, *, eod_token: str | None = None, allow_special: bool = False
) -> JsonTokenizer:
    """Load ``tokenizer.json``, or the folder that holds it.

    Args:
        path: The file or its folder.
        eod_token: Token that ends a document. Left out: ``eos_token`` of a
            ``tokenizer_config.json`` in the same folder, else the usual names.
        allow_special: Let the spelling of a special token in a text become that token.

    Raises:
        TokenizerError: The file is not a tokenizer, or holds no such token.
    """
    if path.is_dir():
        path = path / "tokenizer.json"
    content = read_model_file(path)
    description = _parse(content, path=path)
    check_json_tokenizer(description, path=path)
    model = description.get("model")
    if isinstance(model, dict) and model.get("dropout"):
        # BPE dropout would give other ids at every run.
        model["dropout"] = None
    backend = build_backend(json.dumps(description), path=path)
    return JsonTokenizer(
        backend,
        content=content,
        name=path.name,
        eod_token=eod_token or _configured_eod(path) or _usual_eod(backend),
        allow_special=allow_special,
        splits_at_words=_cuts_words(description.get("pre_tokenizer")),
    )


def build_backend(text: str, *, path: Path) -> tokenizers.Tokenizer:
    """Make the library's tokenizer from JSON text; ``path`` is for the message."""
    try:
        return tokenizers.Tokenizer.from_str(text)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise TokenizerError(
            f"{path} is not a tokenizer of the tokenizers library: {error}"
        ) from error


def _parse(content: bytes, *, path: Path) -> dict[str, Any]:
    try:
        description = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not a JSON tokenizer file: {error}") from error
    if not isinstance(description, dict) or "model" not in description:
        raise TokenizerError(
            f'{path} is JSON but no tokenizer: the member "model" is missing. Give a GPT-2 '
            f"vocabulary by --tokenizer-type GPT2BPETokenizer --vocab-file {path} --merge-file F."
        )
    return description


def _cuts_words(pre_tokenizer: object) -> bool:
    """True if the pre-tokenizer separates words, which makes a cut between two words harmless."""
    if not isinstance(pre_tokenizer, dict):
        return False
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return any(_cuts_words(each) for each in pre_tokenizer.get("pretokenizers", ()))
    if kind == "ByteLevel":
        return pre_tokenizer.get("use_regex", True) is True
    if kind == "Metaspace":
        return pre_tokenizer.get("split", True) is True
    return kind in {"Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Split"}


def _configured_eod(path: Path) -> str | None:
    """Return ``eos_token`` of the model's configuration beside the file, if there is one."""
    config = path.with_name("tokenizer_config.json")
    if not config.is_file():
        return None
    try:
        token = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError, RecursionError):
        return (
            None  # A broken neighbour must not stop a whole tokenizer; the usual names still apply.
        )
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _usual_eod(backend: tokenizers.Tokenizer) -> str | None:
    return next((t for t in _USUAL_EOD_TOKENS if backend.token_to_id(t) is not None), None)


def _eod_id(vocabulary: dict[str, int], *, eod_token: str | None, where: str) -> int | None:
    if eod_token is None:
        return None
    if eod_token not in vocabulary:
        raise TokenizerError(
            f"{where} has no token {eod_token!r} to end a document with; "
            f"choose one of its tokens by --eod-token."
        )
    return vocabulary[eod_token]
