"""Write a conversion's torch files, several at a time, and force them to the disk at the end.

The disk gathers what many small files need for their safety if all are written first; forcing each
as soon as it is written costs one round trip apiece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from mds_ckpt.files.file_operations import FileOperations
from mds_ckpt.pickles.torch_writer import save_torch_file

__all__ = ["write_torch_files"]

Item = TypeVar("Item")
_WAITING = 4
"""Files that are forced to the disk at a time, for each that is written at a time."""


def write_torch_files(
    folder: Path, files: Mapping[str, Any], *, jobs: int, operations: FileOperations
) -> None:
    """Write files with the folders that they need, then force all of it to the disk.

    Args:
        folder: Exists already; its own entries are forced too.
        files: What ``torch.save`` would write, by path below ``folder``.
        jobs: Files in work at a time.
        operations: The disk.
    """
    made = {"": folder}
    for name in files:
        for depth in range(1, name.count("/") + 1):
            parent = "/".join(name.split("/")[:depth])
            if parent not in made:
                made[parent] = folder / parent
                operations.make_folder(made[parent])

    def write(item: tuple[str, Any]) -> None:
        save_torch_file(folder / item[0], item[1], operations=operations, sync=False)

    _each(write, files.items(), jobs=jobs)
    # Who forces a file waits for the disk, not for a processor.
    waiting = jobs if jobs == 1 else _WAITING * jobs
    _each(lambda name: operations.sync_path(folder / name), files, jobs=waiting)
    for path in reversed(made.values()):
        operations.sync_folder(path)


def _each(work: Callable[[Item], None], items: Iterable[Item], *, jobs: int) -> None:
    if jobs == 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        running = [pool.submit(work, item) for item in items]
        try:
            for job in running:
                job.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
