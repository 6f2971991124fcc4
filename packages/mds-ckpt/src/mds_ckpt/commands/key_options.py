"""How the key of an encrypted checkpoint is named on the command line; a secret itself never is."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mds_ckpt.errors import UsageError

if TYPE_CHECKING:
    from mds_ckpt.encryption.keys import KeySource

__all__ = [
    "add_key_options",
    "add_lock_options",
    "add_passphrase_options",
    "add_recipients",
    "has_lock",
    "key_of",
    "lock_of",
    "passphrase_of",
]

_SOURCES = (
    ("identity", "FILE", "age identity file"),
    ("identity-env", "NAME", "environment variable that holds its path"),
    ("passphrase-file", "FILE", "file with the passphrase"),
    ("passphrase-env", "NAME", "environment variable that holds the passphrase"),
    ("key-command", "CMD", "program that unwraps (or wraps) the key"),
)


def add_key_options(parser: argparse.ArgumentParser, *, expect: bool = True) -> None:
    """Add what opens something encrypted."""
    group = parser.add_argument_group("the key, if it is encrypted (one of)")
    for name, metavar, text in _SOURCES:
        group.add_argument(f"--{name}", metavar=metavar, help=text)
    group.add_argument("--ask-passphrase", action="store_true", help="ask for it at the terminal")
    if expect:
        text = "SHA-256 that the plain manifest must have; refuses an older state put back"
        parser.add_argument("--expect", metavar="DIGEST", help=text)


def add_lock_options(parser: argparse.ArgumentParser, *, prefix: str = "") -> None:
    """Add who may open it from now on; ``prefix`` tells them from those who may now."""
    group = parser.add_argument_group("who may open it (one or more)")
    add_recipients(group)
    for name, metavar, text in _SOURCES[2:]:
        group.add_argument(f"--{prefix}{name}", metavar=metavar, help=text)
    text = "ask for it at the terminal"
    group.add_argument(f"--{prefix}ask-passphrase", action="store_true", help=text)


def add_recipients(group: argparse._ArgumentGroup) -> None:
    """Add the options that name age recipients."""
    text = "age public key"
    group.add_argument("--recipient", action="append", default=[], metavar="AGE1...", help=text)
    text = "age public keys, one a line"
    group.add_argument("--recipients-file", metavar="FILE", help=text)
    text = "make a new age identity, write it here (mode 0600), and lock for it"
    group.add_argument("--new-identity", metavar="FILE", help=text)


def add_passphrase_options(group: argparse._ArgumentGroup) -> None:
    """Add where a passphrase comes from, for what is locked by nothing else."""
    for name, metavar, text in _SOURCES[2:4]:
        group.add_argument(f"--{name}", metavar=metavar, help=text)
    group.add_argument("--ask-passphrase", action="store_true", help="ask for it at the terminal")


def passphrase_of(arguments: argparse.Namespace) -> KeySource | None:
    """Where the passphrase comes from, if anything was named."""
    found = {
        "passphrase_file": arguments.passphrase_file,
        "passphrase_variable": arguments.passphrase_env,
        "ask": arguments.ask_passphrase,
    }
    return _source(found)


def key_of(arguments: argparse.Namespace) -> KeySource | None:
    """What opens it, if anything was named."""
    identities = {"identity": arguments.identity, "identity_variable": arguments.identity_env}
    return _source({**identities, **_secrets(arguments, "")})


def has_lock(arguments: argparse.Namespace, *, prefix: str = "") -> bool:
    """Whether anybody was named who may open it."""
    named = (arguments.recipient, arguments.recipients_file, arguments.new_identity)
    return any(named) or any(_secrets(arguments, prefix).values())


@contextmanager
def lock_of(
    arguments: argparse.Namespace, *, prefix: str = ""
) -> Iterator[tuple[list[str], KeySource | None]]:
    """Recipients, and the passphrase or command that may open it, too.

    A new identity is written before the work in the ``with`` block, so that its file can't be what
    fails at the end; it goes again if the work fails.
    """
    from mds_ckpt.encryption.keys import new_identity, read_recipients

    if not has_lock(arguments, prefix=prefix):
        raise UsageError(
            "nobody could open it: give --recipient, --new-identity, --passphrase-file or "
            "--key-command"
        )
    recipients = list(arguments.recipient)
    if arguments.recipients_file is not None:
        recipients += read_recipients(Path(arguments.recipients_file))
    new = None if arguments.new_identity is None else Path(arguments.new_identity)
    if new is not None:
        recipients.append(new_identity(new))
    try:
        yield recipients, _source(_secrets(arguments, prefix))
    except BaseException:
        if new is not None:
            new.unlink(missing_ok=True)
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


def _source(found: dict[str, object]) -> KeySource | None:
    if not any(found.values()):
        return None
    from mds_ckpt.encryption.keys import KeySource

    return KeySource(**found)  # type: ignore[arg-type]
