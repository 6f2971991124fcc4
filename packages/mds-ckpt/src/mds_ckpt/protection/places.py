"""Where backups lie: a local folder, or anything that fsspec reaches by a URL.

A file at a place appears whole or not at all, and is never written twice under one name, but for
what `Place.write` is told to replace.
"""

from __future__ import annotations

import hashlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from mds_ckpt.errors import MachineError, RejectedError
from mds_ckpt.files.file_operations import PARTIAL, REAL, FileOperations, partial_path
from mds_ckpt.files.lock import lock
from mds_ckpt.files.regular_file import RegularFile

__all__ = ["LocalPlace", "Place", "RemotePlace", "is_url", "open_place"]

_BLOCK = 8 << 20


def is_url(text: str) -> bool:
    """Whether a place is named by a URL, such as ``s3://bucket/backups``."""
    return "://" in text and not text.startswith("file://")


def open_place(text: str | Path, *, operations: FileOperations = REAL) -> Place:
    """The place that a path or URL names; it need not exist yet."""
    text = str(text)
    if is_url(text):
        return RemotePlace(text)
    return LocalPlace(Path(text.removeprefix("file://")), operations=operations)


class Place(ABC):
    """Files by relative names with ``/``."""

    name: str

    @abstractmethod
    def blocks(self, path: str) -> Iterator[bytes]:
        """The bytes of a file; RejectedError if there is none."""

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Bytes of a file, or None if there is none."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """All files below a folder, in order."""

    @abstractmethod
    def write(self, path: str, blocks: Iterable[bytes | bytearray]) -> None:
        """Write a file, which appears when it is whole; one that is there is replaced."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file."""

    @abstractmethod
    def writing(self) -> Any:
        """A context in which no other process writes here, as far as the place can promise it."""

    def read(self, path: str, *, limit: int) -> bytes:
        """The bytes of a small file."""
        size = self.size(path)
        if size is not None and size > limit:
            raise self._fault(path, f"it has {size} bytes and at most {limit} are read")
        return b"".join(self.blocks(path))

    def digest(self, path: str) -> str:
        """The SHA-256 of a file."""
        total = hashlib.sha256()
        for block in self.blocks(path):
            total.update(block)
        return total.hexdigest()

    def _fault(self, path: str, reason: str) -> RejectedError:
        return RejectedError(f"{self.name}/{path}", reason, remedy="back it up again")


class LocalPlace(Place):
    """A folder."""

    def __init__(self, root: Path, *, operations: FileOperations = REAL) -> None:
        self.root = root
        self.name = str(root)
        self._disk = operations

    def blocks(self, path: str) -> Iterator[bytes]:
        """The bytes of a file."""
        with RegularFile(self.root / path).open() as file:
            for offset in range(0, file.size, _BLOCK):
                yield bytes(file.read(offset, min(_BLOCK, file.size - offset)))

    def size(self, path: str) -> int | None:
        """Bytes of a file."""
        try:
            return (self.root / path).lstat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def names(self, folder: str) -> list[str]:
        """All files below a folder."""
        found = []
        for above, _, names in os.walk(self.root / folder):
            relative = Path(above).relative_to(self.root)
            found += [(relative / name).as_posix() for name in names if PARTIAL not in name]
        return sorted(found)

    def write(self, path: str, blocks: Iterable[bytes | bytearray]) -> None:
        """Write a file, force it to the disk, and give it its name."""
        target = self.root / path
        self._make_folder(target.parent)
        temporary = partial_path(target)
        try:
            with self._disk.create(temporary) as file:
                for block in blocks:
                    self._disk.write(file, memoryview(block))
                self._disk.sync(file)
            self._disk.replace(temporary, target)
        except (OSError, ValueError):
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        self._disk.sync_folder(target.parent)

    def _make_folder(self, folder: Path) -> None:
        if folder.is_dir():
            return
        self._make_folder(folder.parent)
        self._disk.make_folder(folder)
        self._disk.sync_folder(folder.parent)

    def remove(self, path: str) -> None:
        """Remove a file."""
        self._disk.remove(self.root / path)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the folder's lock, and clear away what dead writers left."""
        self._make_folder(self.root)
        with lock(self.root):
            for above, _, names in os.walk(self.root):
                for name in names:
                    if PARTIAL in name:
                        self._disk.remove(Path(above) / name)
            yield


_NETWORK_ERRORS = {
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "aiohttp": ("ClientError",),
    "gcsfs.retry": ("HttpError",),
    "azure.core.exceptions": ("AzureError",),
}
"""What drivers of fsspec raise besides OSError; looked up where they were imported."""


@contextmanager
def _network(where: str) -> Iterator[None]:
    """Say in one sentence what a network or service answers."""
    try:
        yield
    except FileNotFoundError:
        raise
    except _known_errors() as error:
        text = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise MachineError(
            f"{where}: the service can't be used ({text}); check network, credentials and rights, "
            f"then try again"
        ) from error


def _known_errors() -> tuple[type[BaseException], ...]:
    found: list[type[BaseException]] = [OSError, TimeoutError, EOFError]
    for module, names in _NETWORK_ERRORS.items():
        loaded = sys.modules.get(module)
        found += [getattr(loaded, name) for name in names if hasattr(loaded, name)]
    return tuple(found)


class RemotePlace(Place):
    """A URL of fsspec. An upload becomes visible when it is whole."""

    def __init__(self, url: str) -> None:
        try:
            fsspec = import_module("fsspec")
            self._files, root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise ImportError(
                f"{url}: a backup at a URL needs fsspec and the driver of its service: "
                f"pip install 'mds-ckpt[remote]' ({error})"
            ) from error
        except ValueError as error:
            raise RejectedError(url, str(error), remedy="name a URL that fsspec knows") from None
        self.name = url.rstrip("/")
        self._root = str(root).rstrip("/")

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def blocks(self, path: str) -> Iterator[bytes]:
        """The bytes of a file."""
        try:
            with _network(f"{self.name}/{path}"), self._files.open(self._path(path), "rb") as file:
                while block := file.read(_BLOCK):
                    yield block
        except FileNotFoundError:
            raise self._fault(path, "there is no such file") from None

    def size(self, path: str) -> int | None:
        """Bytes of a file."""
        try:
            with _network(f"{self.name}/{path}"):
                self._files.invalidate_cache()
                return int(self._files.size(self._path(path)))
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        """All files below a folder."""
        try:
            with _network(f"{self.name}/{folder}"):
                self._files.invalidate_cache()
                found = self._files.find(self._path(folder))
        except FileNotFoundError:
            return []
        start = len(self._root) + 1
        return sorted(str(each)[start:] for each in found)

    def write(self, path: str, blocks: Iterable[bytes | bytearray]) -> None:
        """Upload a file."""
        target = self._path(path)
        with _network(f"{self.name}/{path}"):
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            file = self._files.open(target, "wb", autocommit=False)
            try:
                for block in blocks:
                    file.write(bytes(block))
                file.close()
            except BaseException:
                with suppress(OSError, AttributeError, NotImplementedError):
                    file.discard()
                raise
            file.commit()

    def remove(self, path: str) -> None:
        """Remove a file."""
        with _network(f"{self.name}/{path}"):
            self._files.rm_file(self._path(path))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Nothing is held: object stores have no lock.

        Objects are named by their content, so that writers that meet write the same.
        """
        yield
