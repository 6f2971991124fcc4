"""The commands encrypt, decrypt and rotate-key."""

from __future__ import annotations

import argparse
import sys

from mds_data.commands.key_options import key_of, lock_of
from mds_data.commands.output import write
from mds_data.commands.progress import megabytes
from mds_data.store.encrypt import decrypt_store, encrypt_store
from mds_data.store.encrypt import rotate_key as rotate

__all__ = ["decrypt", "encrypt", "rotate_key"]


def encrypt(arguments: argparse.Namespace) -> int:
    """Write an encrypted copy; its digest goes to stdout."""
    with lock_of(arguments) as (recipients, key):
        found = encrypt_store(arguments.store, arguments.output, recipients=recipients, key=key)
    _say(
        f"{megabytes(found.size)} MB encrypted in {arguments.output}; keep this digest apart from "
        f"it, --expect takes it:"
    )
    write([found.digest])
    return 0


def decrypt(arguments: argparse.Namespace) -> int:
    """Write the plain copy."""
    key = key_of(arguments, required=True)
    assert key is not None
    found = decrypt_store(arguments.store, arguments.output, key=key, expect=arguments.expect)
    _say(f"{megabytes(found.size)} MB decrypted in {arguments.output}")
    return 0


def rotate_key(arguments: argparse.Namespace) -> int:
    """Rewrite the key header."""
    old = key_of(arguments, required=True)
    assert old is not None
    with lock_of(arguments, prefix="new-") as (recipients, new):
        rotate(arguments.store, old=old, recipients=recipients, new=new)
    _say(f"{arguments.store} opens with the new key only, from now on")
    return 0


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
