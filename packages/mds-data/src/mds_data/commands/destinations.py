"""Outputs on object storage: made in a local folder first, then sent, the manifest last."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from mds_data.commands.errors import UsageError
from mds_data.commands.progress import megabytes
from mds_data.errors import DataError
from mds_data.store.folder import is_store
from mds_data.store.upload import check_free_place, check_writable, upload_files, upload_store

__all__ = ["run_staged"]

Command = Callable[[argparse.Namespace], int]


def run_staged(command: Command, arguments: argparse.Namespace, *, member: str) -> int:
    """Run a command whose output, the argument ``member``, is a URL, and send what it made.

    Raises:
        UsageError: The URL names no store inside a bucket.
        StoreError: There is a store already.
        RemoteError: It can't be sent; what was made is kept if the command can be resumed.
    """
    url: str = getattr(arguments, member)
    above, _, name = url.rpartition("/")
    if above.endswith("/") or not name:
        raise UsageError(f"{url} names a bucket; add the name of the store in it, as {url}/store.")
    check_free_place(url)
    if member == "output":  # a prefix may be a pair's, whose folder is the one above
        check_writable(url)
    staging = (arguments.staging or Path()) / f"{name}.staging"
    resumable = hasattr(arguments, "resume")
    if staging.exists() and not resumable:
        raise DataError(f"{staging} is left from a run that was killed; remove it first.")
    staging.mkdir(parents=True, exist_ok=True)
    try:
        code = command(argparse.Namespace(**{**vars(arguments), member: staging / name}))
        if code == 0:
            _send_or_keep(staging, above, name=name, resumable=resumable)
    finally:
        with suppress(OSError):  # what an interrupted run keeps is in it
            staging.rmdir()
    return code


def _send_or_keep(staging: Path, above: str, *, name: str, resumable: bool) -> None:
    stores = list(_stores(staging))
    pair = [path for end in (".bin", ".idx") if (path := staging / f"{name}{end}").is_file()]
    if not stores and not pair:
        raise DataError("only stores and Megatron pairs can be sent to a URL; name a folder.")
    try:
        _send(staging, above, stores=stores, pair=pair)
    except (OSError, ValueError, KeyboardInterrupt) as error:
        if resumable:
            error.add_note(f"What was made is kept in {staging}: send it by --resume.")
            raise
        _remove(staging, stores=stores, pair=pair)
        raise
    _remove(staging, stores=stores, pair=pair)


def _send(staging: Path, above: str, *, stores: list[Path], pair: list[Path]) -> None:
    for store in stores:
        url = f"{above}/{store.relative_to(staging).as_posix()}"
        sizes: list[int] = []
        upload_store(store, url, on_bytes=sizes.append)
        _say(f"{len(sizes)} files, {megabytes(sum(sizes))} MB sent to {url}")
    if pair:  # .idx last: without it Megatron reads nothing
        upload_files(pair, above)
        _say(f"{' and '.join(path.name for path in pair)} sent to {above}")


def _remove(staging: Path, *, stores: list[Path], pair: list[Path]) -> None:
    for store in stores:
        shutil.rmtree(store)
        for folder in store.parents:  # a split's parts lie one deeper
            if folder == staging:
                break
            with suppress(OSError):
                folder.rmdir()
    for path in pair:
        path.unlink()


def _stores(folder: Path) -> Iterator[Path]:
    for child in sorted(folder.iterdir()):
        if is_store(child):
            yield child
        elif child.is_dir():
            yield from _stores(child)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
