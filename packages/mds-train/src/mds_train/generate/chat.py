"""The chat template that belongs to a checkpoint; rendering one runs no code."""

from __future__ import annotations

from pathlib import Path

from mds_ckpt import Checkpoint, companions
from mds_data.chat.formats import chat_template
from mds_data.chat.template import ChatTemplate, chat_template_of
from mds_data.chat.values import TemplateError
from mds_train.errors import InputError
from mds_train.model_source import companion, open_model

__all__ = ["find_chat_template"]


_FILES = ("chat_template.jinja", "tokenizer_config.json")


def find_chat_template(
    checkpoint: Path | Checkpoint, *, named: str | None = None
) -> ChatTemplate | None:
    """Return how conversations are written for a model.

    Args:
        checkpoint: as for `load_model`.
        named: a file, or the name of a well-known format, to take instead of its own.

    Returns:
        The template, or None if the checkpoint has none and none was named.

    Raises:
        InputError: If the template does not exist or cannot be rendered safely.
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_model(checkpoint)
    try:
        if named is not None:
            return chat_template(named, eos_token=_end_mark(opened))
        files = {name: file for name in _FILES if (file := companion(opened, name)) is not None}
        return chat_template_of(
            {name: companions.read(file).decode("utf-8", "replace") for name, file in files.items()}
        )
    except TemplateError as error:
        place = "" if named is not None else f"{opened.path}: "
        raise InputError(f"{place}{error}.") from error


def _end_mark(checkpoint: Checkpoint) -> str:
    """How the tokenizer spells the end of a text."""
    settings = companion(checkpoint, "tokenizer_config.json")
    if settings is None:
        return ""
    mark = companions.read_json(settings).get("eos_token")
    spelling = mark.get("content") if isinstance(mark, dict) else mark
    return spelling if isinstance(spelling, str) else ""
