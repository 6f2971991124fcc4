"""The chat template that belongs to a checkpoint; rendering one runs no code."""

from __future__ import annotations

from pathlib import Path

from mds_ckpt.companions import read_json
from mds_data.chat.formats import chat_template
from mds_data.chat.template import ChatTemplate, load_chat_template
from mds_data.chat.values import TemplateError
from mds_train.errors import InputError
from mds_train.model_source import open_model

__all__ = ["find_chat_template"]


def find_chat_template(checkpoint: Path, *, named: str | None = None) -> ChatTemplate | None:
    """Return how conversations are written for a model.

    Args:
        checkpoint: as for `load_model`.
        named: a file, or the name of a well-known format, to take instead of its own.

    Returns:
        The template, or None if the checkpoint has none and none was named.

    Raises:
        InputError: If the template does not exist or cannot be rendered safely.
    """
    try:
        if named is not None:
            return chat_template(named, eos_token=_end_mark(checkpoint))
        companions = open_model(checkpoint).companions
        if "chat_template.jinja" in companions:
            return load_chat_template(companions["chat_template.jinja"])
        settings = companions.get("tokenizer_config.json")
        if settings is not None and "chat_template" in read_json(settings):
            return load_chat_template(settings)
    except TemplateError as error:
        raise InputError(f"{error}.") from error
    return None


def _end_mark(checkpoint: Path) -> str:
    """How the tokenizer spells the end of a text."""
    companions = open_model(checkpoint).companions
    if "tokenizer_config.json" not in companions:
        return ""
    mark = read_json(companions["tokenizer_config.json"]).get("eos_token")
    spelling = mark.get("content") if isinstance(mark, dict) else mark
    return spelling if isinstance(spelling, str) else ""
