"""A configuration as the original's flags, for scripts that still start the original."""

from __future__ import annotations

import shlex

from mds_train.config.fields import field_table
from mds_train.config.loading import Settings
from mds_train.config.megatron_kinds import Switch, Value
from mds_train.config.megatron_table import OLD_FLAGS
from mds_train.config.schema import TrainConfig

__all__ = ["as_flags"]

_HEAD = """\
#!/usr/bin/env bash
# {title}
# As flags of Megatron-DeepSpeed; data, paths and nodes are yours.
"""
# Where the original's default is another one, silence would say something else.
_OTHER_DEFAULTS = ("model.hidden_dropout", "model.attention_dropout")
# Flags that came after the original.
_NEWER = ("checkpoint.async_save",)
_SPELLING = {("optimizer.name", "adamw"): "adam"}
_OWN = ("watch.", "train.run_dir", "checkpoint.")


def as_flags(settings: Settings, *, title: str) -> str:
    """A bash array ``ARGS`` of the original's flags.

    Args:
        settings: What is set.
        title: First comment.

    Returns:
        The script; a comment lists the settings for which the original has no flag.
    """
    specs = field_table(TrainConfig)
    values = {key: specs[key].default for key in _OTHER_DEFAULTS}
    values |= {key: setting.value for key, setting in settings.items()}
    flags: list[str] = []
    missing: list[str] = []
    for key, value in values.items():
        words = None if key in _NEWER else _flag(key, value)
        if words is not None:
            flags += words
        elif not key.startswith(_OWN) and value not in (None, specs[key].default):
            missing.append(f"#   {key} = {value}\n")
    lines = "".join(f"    {flag}\n" for flag in flags)
    note = f"# No flag of the original says:\n{''.join(missing)}" if missing else ""
    return f"{_HEAD.format(title=title)}{note}ARGS=(\n{lines})\n"


def _flag(key: str, value: object) -> list[str] | None:
    """The flag of one setting; an empty list where leaving it out says the same."""
    for flag in OLD_FLAGS:
        if isinstance(flag, Switch) and len(flag.values) == 1 and flag.values.get(key) == value:
            return [flag.names[0]]
    for flag in OLD_FLAGS:
        if isinstance(flag, Value) and flag.key == key and not flag.note:
            if value is None or isinstance(value, tuple | list | bool):
                return None
            text = _SPELLING.get((key, str(value)), str(value))
            if flag.convert is not None and flag.convert(text) != str(value):
                return None
            return [f"{flag.names[0]} {shlex.quote(text)}"]
    return None
