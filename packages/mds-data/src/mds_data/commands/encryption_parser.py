"""How encrypt, decrypt and rotate-key are spelled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mds_data.commands.key_options import add_key_options, add_lock_options
from mds_data.commands.parser import command

if TYPE_CHECKING:
    from mds_data.commands.parser import Commands

__all__ = ["add_encryption_commands"]


def add_encryption_commands(commands: Commands) -> None:
    """Add encrypt, decrypt and rotate-key."""
    encrypt = command(
        commands,
        "encrypt",
        run="mds_data.commands.encryption:encrypt",
        help="write an encrypted copy of a store",
        description="Write an encrypted copy. It is read at random without decrypting it first.\n"
        "Names, shapes and sources are sealed, too. The store itself stays: remove it yourself.",
        examples="examples:\n"
        "  mds-data encrypt store --new-identity key.txt --output sealed\n"
        "  mds-data inspect sealed --identity key.txt",
    )
    encrypt.add_argument("store", type=Path, metavar="STORE")
    encrypt.add_argument("--output", type=Path, required=True, metavar="SEALED")
    add_lock_options(encrypt)
    decrypt = command(
        commands,
        "decrypt",
        run="mds_data.commands.encryption:decrypt",
        help="write the plain copy of an encrypted store",
        description="Write the store that was encrypted, byte for byte.",
        examples="example:\n  mds-data decrypt sealed --identity key.txt --output store",
    )
    decrypt.add_argument("store", type=Path, metavar="SEALED")
    decrypt.add_argument("--output", type=Path, required=True, metavar="STORE")
    add_key_options(decrypt)
    rotate = command(
        commands,
        "rotate-key",
        run="mds_data.commands.encryption:rotate_key",
        help="change who can open an encrypted store",
        description="Rewrite the store's key header only, whatever its size. Who kept a copy of\n"
        "the old header can still read: against that, decrypt and encrypt anew.",
        examples="example:\n  mds-data rotate-key sealed --identity old.txt --recipient age1...",
    )
    rotate.add_argument("store", type=Path, metavar="SEALED")
    add_key_options(rotate, old=True)
    add_lock_options(rotate, prefix="new-")
