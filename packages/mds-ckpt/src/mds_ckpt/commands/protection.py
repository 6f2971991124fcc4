"""The commands that keep checkpoints safe: how they are spelled, and what they say."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from mds_ckpt.commands.key_options import add_key_options, add_lock_options, key_of, lock_of
from mds_ckpt.commands.report import say
from mds_ckpt.errors import UsageError
from mds_ckpt.escape import printable

if TYPE_CHECKING:
    from mds_ckpt.encryption.keys import KeySource

__all__ = ["add_protection_commands"]

Add = Callable[[str, str, Callable[[argparse.Namespace], int]], argparse.ArgumentParser]


def add_protection_commands(add: Add) -> None:
    """Add encrypt, decrypt and rotate-key."""
    parser = add("encrypt", "write an encrypted copy, readable in part like the original", _encrypt)
    parser.add_argument("source", metavar="STEP", help="a step-N folder of the mds format")
    parser.add_argument("target", metavar="DST", help="the folder that is to appear")
    add_lock_options(parser)
    parser = add("decrypt", "write the plain copy of an encrypted checkpoint", _decrypt)
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("target", metavar="DST", help="the folder that is to appear")
    add_key_options(parser)
    parser = add("rotate-key", "change who can open it; rewrites the key header only", _rotate)
    parser.add_argument("path", metavar="PATH")
    add_key_options(parser, expect=False)
    add_lock_options(parser, prefix="new-")


def _encrypt(arguments: argparse.Namespace) -> int:
    from mds_ckpt.protection.encrypt import encrypt_checkpoint

    with lock_of(arguments) as (recipients, key):
        found = encrypt_checkpoint(
            arguments.source, arguments.target, recipients=recipients, key=key
        )
    say(
        f"{printable(arguments.target)}: {found.size:,} bytes encrypted; keep this digest apart "
        f"from it, --expect takes it:"
    )
    say(found.digest)
    return 0


def _decrypt(arguments: argparse.Namespace) -> int:
    from mds_ckpt.protection.encrypt import decrypt_checkpoint

    key = _needed_key(arguments)
    found = decrypt_checkpoint(arguments.source, arguments.target, key=key, expect=arguments.expect)
    say(f"{printable(arguments.target)}: {found.size:,} bytes decrypted")
    return 0


def _rotate(arguments: argparse.Namespace) -> int:
    from mds_ckpt.protection.encrypt import rotate_key

    key = _needed_key(arguments)
    with lock_of(arguments, prefix="new-") as (recipients, new):
        rotate_key(arguments.path, old=key, recipients=recipients, new=new)
    say(f"{printable(arguments.path)} opens with the new key only, from now on")
    return 0


def _needed_key(arguments: argparse.Namespace) -> KeySource:
    key = key_of(arguments)
    if key is None:
        raise UsageError("the key is missing: give --identity, --passphrase-file or --key-command")
    return key
