"""The small files that travel with a model: tokenizer, generation settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mds_ckpt.errors import RejectedError
from mds_ckpt.files import strict_json
from mds_ckpt.files.regular_file import RegularFile, read_whole

NAMES = frozenset(
    {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "spiece.model",
        "merges.txt",
        "tokenizer.model",
        "chat_template.jinja",
        "generation_config.json",
    }
)
SIZE_LIMIT = 256 << 20
_END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")


def find(folder: Path) -> dict[str, Path]:
    """The companions that lie in ``folder``, by name."""
    return {name: folder / name for name in sorted(NAMES) if (folder / name).is_file()}


def beside(
    plain: Mapping[str, Path], sealed: Mapping[str, RegularFile]
) -> dict[str, Path | RegularFile]:
    """The files of a checkpoint that may be companions, wherever they lie."""
    return {**plain, **sealed}


def read(path: Path | RegularFile) -> bytes:
    """A companion's content."""
    if isinstance(path, RegularFile):
        with path.open() as file:
            return bytes(file.read(0, file.size))
    return read_whole(path, limit=SIZE_LIMIT, cache_links=True)


def read_json(path: Path | RegularFile) -> dict[str, Any]:
    """A JSON companion or configuration; RejectedError unless it is one object of strict JSON."""
    data = read(path)
    path = path.path if isinstance(path, RegularFile) else path
    try:
        members = strict_json.parse(data)
    except strict_json.JsonError as error:
        raise RejectedError(path, str(error), remedy="get the file again from its source") from None
    if not isinstance(members, dict):
        raise RejectedError(
            path, "it is not one JSON object", remedy="get the file again from its source"
        )
    return members


def end_token(companions: Mapping[str, Path | RegularFile]) -> tuple[str, int] | None:
    """The token that ends a document and its id, if ``tokenizer.json`` declares a usual one."""
    if "tokenizer.json" not in companions:
        return None
    added = read_json(companions["tokenizer.json"]).get("added_tokens")
    ids = {
        token["content"]: token["id"]
        for token in (added if isinstance(added, list) else [])
        if isinstance(token, dict)
        and isinstance(token.get("content"), str)
        and type(token.get("id")) is int
    }
    return next(((token, ids[token]) for token in _END_TOKENS if token in ids), None)


def tokenizer_config(end: tuple[str, int] | None, *, longest: int) -> bytes:
    """A ``tokenizer_config.json`` with which transformers loads a lone ``tokenizer.json``."""
    members: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
    }
    if end is not None:
        members |= {"eos_token": end[0], "bos_token": end[0]}
    return as_json(members)


def as_json(members: Mapping[str, Any]) -> bytes:
    """Text of a JSON file as transformers writes them."""
    return (json.dumps(members, indent=2, ensure_ascii=False) + "\n").encode()
