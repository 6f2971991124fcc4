"""Signing on the command line, and how a signature is named when something is verified."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from mds_ckpt.commands.key_options import add_passphrase_options, passphrase_of
from mds_ckpt.commands.report import say
from mds_ckpt.errors import UsageError
from mds_ckpt.escape import printable

__all__ = ["add_signature_options", "add_signing_command", "signature_differs"]

Add = Callable[[str, str, Callable[[argparse.Namespace], int]], argparse.ArgumentParser]


def add_signing_command(add: Add) -> None:
    """Add sign."""
    text = "sign every file of a folder with a private key of yours, offline (OpenSSF format)"
    parser = add("sign", text, _sign)
    parser.add_argument("path", metavar="PATH", help="a checkpoint of any format, or a store")
    group = parser.add_argument_group("the private key (one of)")
    text = "PEM file of an elliptic key that only you can read"
    group.add_argument("--private-key", type=Path, metavar="FILE", help=text)
    text = "make one, write it here (mode 0600), and the public key to FILE.pub"
    group.add_argument("--new-private-key", type=Path, metavar="FILE", help=text)
    add_passphrase_options(parser.add_argument_group("what the private key is encrypted with"))
    text = "the signature's file; PATH.sig if left out"
    parser.add_argument("--signature", type=Path, metavar="FILE", help=text)


def add_signature_options(parser: argparse.ArgumentParser) -> None:
    """Add what a signature is checked by."""
    group = parser.add_argument_group("the signature, if it is to be checked")
    text = "PEM file of the signer's public key"
    group.add_argument("--public-key", type=Path, metavar="FILE", help=text)
    group.add_argument("--signature", type=Path, metavar="FILE", help="PATH.sig if left out")


def _sign(arguments: argparse.Namespace) -> int:
    from mds_ckpt.protection.signature import new_signing_key, sign, signature_beside

    key, new = arguments.private_key, arguments.new_private_key
    if (key is None) == (new is None):
        raise UsageError("give the --private-key to sign with, or make one by --new-private-key")
    path = Path(arguments.path)
    passphrase = passphrase_of(arguments)
    signature = arguments.signature or signature_beside(path)
    public = None if new is None else new_signing_key(new, passphrase=passphrase)
    try:
        sign(path, private_key=key or new, signature=signature, passphrase=passphrase)
    except BaseException:
        if public is not None:
            public.unlink()
            new.unlink()
        raise
    say(f"{printable(str(signature))}: signs every file of {printable(str(path))}")
    if public is not None:
        say(f"give {printable(str(public))} to whoever is to check it, by a way that they trust")
    return 0


def signature_differs(arguments: argparse.Namespace) -> bool:
    """Check the signature that was named, if one was; says what it found."""
    from mds_ckpt.protection.signature import check_signature, signature_beside

    if arguments.public_key is None:
        if arguments.signature is not None:
            raise UsageError("--signature needs the signer's --public-key")
        return False
    path = Path(arguments.path)
    found = check_signature(
        path,
        public_key=arguments.public_key,
        signature=arguments.signature or signature_beside(path),
    )
    for difference in found.differences:
        say(printable(difference))
    where = printable(str(found.signature))
    if found.differences:
        say(f"{where}: not the signature of what is here")
        return True
    say(f"{where}: every file is as it was signed")
    return False
