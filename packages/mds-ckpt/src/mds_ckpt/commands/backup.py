"""The commands backup and restore, and verify of backups: how they are spelled, what they say."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mds_ckpt.commands.key_options import (
    add_key_options,
    add_recipients,
    has_lock,
    key_of,
    lock_of,
)
from mds_ckpt.commands.report import say
from mds_ckpt.errors import UsageError
from mds_ckpt.escape import printable

if TYPE_CHECKING:
    from mds_ckpt.encryption.keys import KeySource

__all__ = ["add_backup_commands", "verify_backups"]

Add = Callable[[str, str, Callable[[argparse.Namespace], int]], argparse.ArgumentParser]


def add_backup_commands(add: Add) -> None:
    """Add backup and restore."""
    text = "copy checkpoints or a token store to a second place; only what is new there"
    parser = add("backup", text, _backup)
    text = "a step-N folder, a folder of them, or a token store"
    parser.add_argument("path", metavar="PATH", help=text)
    text = "a folder, or a URL such as s3://bucket/backups"
    parser.add_argument("--to", required=True, metavar="PLACE", help=text)
    parser.add_argument("--name", metavar="NAME", help="what it is called there; its own name")
    text = "of the checkpoints there, keep this many of the newest steps; all if left out"
    parser.add_argument("--keep-last", type=int, metavar="N", help=text)
    add_key_options(parser, expect=False)
    text = "who else may open it, said when the first backup is made (none: it is plain)"
    add_recipients(parser.add_argument_group(text))
    parser = add("restore", "bring a folder back from a backup; every byte is compared", _restore)
    parser.add_argument("place", metavar="PLACE", help="a folder, or a URL")
    parser.add_argument("target", metavar="DST", nargs="?", help="the folder that is to appear")
    parser.add_argument("--name", metavar="NAME", help="which one; the newest if left out")
    parser.add_argument("--list", action="store_true", help="say what is there, restore nothing")
    text = "restore into a temporary folder, check it, remove it; exit code 1 if anything is wrong"
    parser.add_argument("--drill", action="store_true", help=text)
    add_key_options(parser)


def _backup(arguments: argparse.Namespace) -> int:
    from mds_ckpt.protection.backup import back_up, prune_backups
    from mds_ckpt.protection.retention import newest_steps

    if arguments.keep_last is not None and arguments.keep_last < 1:
        raise UsageError(f"--keep-last is {arguments.keep_last}; give a number from 1 on")
    with _locks(arguments) as (recipients, key):
        for folder in _folders(arguments.path, arguments.name):
            found = back_up(
                folder, arguments.to, name=arguments.name, recipients=recipients, key=key
            )
            new = f"{found.copied} of {len(found.snapshot.files)} files copied"
            name = printable(found.snapshot.name)
            say(f"{name}: {new}, {found.nbytes:,} bytes; digest {found.snapshot.digest}")
        if arguments.keep_last is not None:
            keep = newest_steps(arguments.keep_last)
            for name in prune_backups(arguments.to, keep=keep, key=key):
                say(f"{printable(name)}: removed from {printable(arguments.to)}")
    return 0


@contextmanager
def _locks(arguments: argparse.Namespace) -> Iterator[tuple[list[str], KeySource | None]]:
    """Recipients of new backups, and what opens them; a new identity opens them, too."""
    key = key_of(arguments)
    if not has_lock(arguments):
        yield [], key
        return
    with lock_of(arguments) as (recipients, _):
        if key is None and arguments.new_identity is not None:
            from mds_ckpt.encryption.keys import KeySource

            key = KeySource(identity=arguments.new_identity)
        yield recipients, key


def _folders(path: str, name: str | None) -> list[Path]:
    """The folder itself, or the whole checkpoints in it, the oldest first."""
    from mds_ckpt.commit import check_folder, step_folders
    from mds_ckpt.errors import CheckpointError
    from mds_ckpt.manifest import MANIFEST_NAME

    root = Path(path)
    if (root / MANIFEST_NAME).exists() or not root.is_dir():
        return [root]
    if name is not None:
        raise UsageError(f"{path} is a folder of checkpoints, and --name names one; name a step")
    found = []
    for folder in reversed(step_folders(root)):
        try:
            check_folder(folder, digests=False)
        except CheckpointError as error:
            say(f"passed over: {error}")
        else:
            found.append(folder)
    if not found:
        raise UsageError(f"{printable(path)} holds no checkpoint or store to back up")
    return found


def _restore(arguments: argparse.Namespace) -> int:
    from mds_ckpt.protection.backup import restore, snapshots

    key = key_of(arguments)
    if sum((arguments.target is not None, arguments.drill, arguments.list)) != 1:
        raise UsageError("give DST, or --drill, or --list")
    if arguments.list:
        for each in snapshots(arguments.place, key=key):
            about = f"{len(each.files)} files, {each.nbytes:,} bytes, {each.created}"
            say(f"{printable(each.name)}: {about}, digest {each.digest}")
        return 0
    if arguments.drill:
        return _drill(arguments, key)
    found = restore(
        arguments.place, arguments.target, name=arguments.name, key=key, expect=arguments.expect
    )
    say(
        f"{printable(arguments.target)}: {printable(found.name)} of {found.created}, "
        f"{len(found.files)} files, {found.nbytes:,} bytes, all as backed up"
    )
    return 0


def _drill(arguments: argparse.Namespace, key: KeySource | None) -> int:
    from mds_ckpt.protection.backup import drill

    found, problems = drill(arguments.place, name=arguments.name, key=key, expect=arguments.expect)
    for problem in problems:
        say(str(problem))
    about = f"{printable(found.name)} of {found.created}, {found.nbytes:,} bytes"
    if problems:
        say(f"{about}: {len(problems)} problems; it can't be relied on")
        return 1
    say(f"{about}: restored, verified and removed again; the backup is good")
    return 0


def verify_backups(arguments: argparse.Namespace) -> int:
    """Read all backups at a place; 1 if anything is wrong."""
    from mds_ckpt.protection.backup import check_backups

    count, nbytes, problems = check_backups(arguments.to, key=key_of(arguments))
    for problem in problems:
        say(str(problem))
    about = f"{printable(arguments.to)}: {count} backups, {nbytes:,} bytes"
    say(f"{about}: {len(problems)} problems" if problems else f"{about}, all as written")
    return 1 if problems else 0
