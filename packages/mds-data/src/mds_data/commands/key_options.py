"""How the key of an encrypted store is named on the command line; a secret itself never is."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mds_data.commands.errors import UsageError

if TYPE_CHECKING:
    from mds_data.encryption.keys import KeySource

__all__ = ["add_expect", "add_key_options", "add_lock_options", "key_of", "lock_of"]

_SOURCES = (
    ("identity", Path, "FILE", "age identity file"),
    ("identity-env", str, "NAME", "environment variable that holds its path"),
    ("passphrase-file", Path, "FILE", "file with the passphrase"),
    ("passphrase-env", str, "NAME", "environment variable that holds the passphrase"),
    ("key-command", str, "CMD", "program that unwraps (or wraps) the key"),
)


def add_key_options(parser: argparse.ArgumentParser, *, old: bool = False) -> None:
    """Add what opens an encrypted store."""
    group = parser.add_argument_group("the key of an encrypted store (one of)")
    for name, kind, metavar, text in _SOURCES:
        group.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
    group.add_argument("--ask-passphrase", action="store_true", help="ask for it at the terminal")
    if not old:
        add_expect(parser)


def add_expect(parser: argparse.ArgumentParser) -> None:
    """Add --expect."""
    parser.add_argument(
        "--expect",
        metavar="DIGEST",
        help="SHA-256 that the plain manifest must have; refuses an older state put back",
    )


def add_lock_options(parser: argparse.ArgumentParser, *, prefix: str = "") -> None:
    """Add who may open the store from now on; ``prefix`` tells them from those who may now."""
    group = parser.add_argument_group("who may open it (one or more)")
    group.add_argument(
        "--recipient", action="append", default=[], metavar="AGE1...", help="age public key"
    )
    group.add_argument(
        "--recipients-file", type=Path, metavar="FILE", help="age public keys, one a line"
    )
    group.add_argument(
        "--new-identity",
        type=Path,
        metavar="FILE",
        help="make a new age identity, write it here (mode 0600), and lock for it",
    )
    for name, kind, metavar, text in _SOURCES[2:]:
        group.add_argument(f"--{prefix}{name}", type=kind, metavar=metavar, help=text)
    group.add_argument(
        f"--{prefix}ask-passphrase", action="store_true", help="ask for it at the terminal"
    )


def key_of(arguments: argparse.Namespace, *, required: bool = False) -> KeySource | None:
    """What opens the store, if anything was named."""
    found = {
        "identity": arguments.identity,
        "identity_variable": arguments.identity_env,
        **_secrets(arguments, ""),
    }
    if not any(found.values()):
        if required:
            raise UsageError(
                "the store's key is missing: give --identity, --passphrase-file or --key-command."
            )
        return None
    return _source(found)


@contextmanager
def lock_of(
    arguments: argparse.Namespace, *, prefix: str = ""
) -> Iterator[tuple[list[str], KeySource | None]]:
    """Recipients, and the passphrase or command that may open the store, too.

    A new identity is written before the work in the ``with`` block, so that its file can't be what
    fails at the end; it goes again if the work fails.
    """
    from mds_data.encryption.keys import new_identity, read_recipients

    found = _secrets(arguments, prefix)
    recipients = list(arguments.recipient)
    if arguments.recipients_file is not None:
        recipients += read_recipients(arguments.recipients_file)
    if not (recipients or arguments.new_identity or any(found.values())):
        raise UsageError(
            "nobody could open it: give --recipient, --new-identity, --passphrase-file or "
            "--key-command."
        )
    if arguments.new_identity is not None:
        recipients.append(new_identity(arguments.new_identity))
    try:
        yield recipients, _source(found) if any(found.values()) else None
    except BaseException:
        if arguments.new_identity is not None:
            arguments.new_identity.unlink(missing_ok=True)
        raise


def _secrets(arguments: argparse.Namespace, prefix: str) -> dict[str, object]:
    start = prefix.replace("-", "_")
    names = {
        "passphrase_file": "passphrase_file",
        "passphrase_variable": "passphrase_env",
        "key_command": "key_command",
        "ask": "ask_passphrase",
    }
    return {field: getattr(arguments, start + option) for field, option in names.items()}


def _source(found: dict[str, object]) -> KeySource:
    from mds_data.encryption.keys import KeySource

    return KeySource(**found)  # type: ignore[arg-type]
