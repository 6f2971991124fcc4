"""How a table names the key of what is encrypted: by where it lies, never the key itself."""

from __future__ import annotations

from typing import Protocol

__all__ = ["KEY_FIELDS", "KeyFields", "named_keys", "ways_to_name"]


class KeyFields(Protocol):
    """The fields of a table that names a key."""

    @property
    def identity(self) -> str | None:
        """File of an age identity."""

    @property
    def passphrase_file(self) -> str | None:
        """File with a passphrase."""

    @property
    def passphrase_variable(self) -> str | None:
        """Environment variable that holds a passphrase."""

    @property
    def key_command(self) -> str | None:
        """Program that unwraps a key."""


KEY_FIELDS = ("identity", "passphrase_file", "passphrase_variable", "key_command")


def named_keys(fields: KeyFields) -> dict[str, str]:
    """What is named, by the words of `KeySource` in mds-data and mds-ckpt; empty for no key."""
    named = {name: getattr(fields, name) for name in KEY_FIELDS}
    return {name: value for name, value in named.items() if value is not None}


def ways_to_name(table: str) -> str:
    """The end of a sentence that asks for a key."""
    *others, last = (f"{table}.{name}" for name in KEY_FIELDS)
    return f"{', '.join(others)} or {last}"
