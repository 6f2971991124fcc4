"""What the ``.metadata`` of a torch distributed checkpoint says: tensors, chunks, and their places.

The file is a pickle of torch's own classes. It is read by our interpreter; only the few fields
below are looked at, and each is checked, because offsets and lengths decide what is read.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mds_ckpt.errors import RejectedError
from mds_ckpt.files.regular_file import RegularFile, name_fault, read_whole
from mds_ckpt.pickles.build import TORCH_DTYPES, item_size
from mds_ckpt.pickles.machine import Machine, PickleError, PickleLimits
from mds_ckpt.pickles.opcodes import run
from mds_ckpt.pickles.records import Opaque, TorchDtype, type_name
from mds_ckpt.tensors.box import Box, coverage_fault, size

__all__ = ["NAME", "Chunk", "Metadata", "Place", "StoredTensor", "read_metadata"]

NAME = ".metadata"
LIMITS = PickleLimits(size=32 << 20, operations=2_000_000)
LONGEST_NAME = 4096
_MOST = 1 << 62
_COPY_AGAIN = "copy the checkpoint again from its source"
_UNTRUSTED = "list what it would import with `mds-ckpt scan`, and open it with nothing else"


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a data file."""

    path: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor and the record that holds it."""

    box: Box
    place: Place


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor under its stored name; its chunks cover it exactly once."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Metadata:
    """All tensors and objects by stored name."""

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, Place]


class _IndexMachine(Machine):
    """Our interpreter, for a pickle whose dictionary keys are ``MetadataIndex`` objects."""

    __slots__ = ()

    def key(self, value: Any) -> Hashable:
        """The name and offset of a ``MetadataIndex`` as one string; other keys as always."""
        if not isinstance(value, Opaque) or value.cls.name != "MetadataIndex":
            return super().key(value)
        name, offset = value.get("fqn"), value.get("offset")
        if not isinstance(name, str) or len(name) > LONGEST_NAME or "\0" in name:
            raise PickleError("an index names no tensor")
        if offset is not None and not _is_extents(offset):
            raise PickleError("an index has an offset that is no list of numbers")
        self.charge(4 * len(name))
        return _key(name, offset)


def _is_extents(value: Any) -> bool:
    return (
        isinstance(value, tuple | list)
        and len(value) <= 64
        and all(type(extent) is int and 0 <= extent <= _MOST for extent in value)
    )


def _key(name: str, offset: Any) -> str:
    return name if offset is None else f"{name}\0{','.join(map(str, offset))}"


def read_metadata(folder: Path) -> Metadata:
    """Read ``.metadata`` of ``folder``, and look whether the files it names are long enough.

    Raises:
        RejectedError: It is hostile or damaged, or a tensor's pieces are missing.
    """
    return _Reader(folder).read()


class _Reader:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / NAME
        self._sizes: dict[str, int] = {}
        self._places: Mapping[Any, Any] = {}

    def read(self) -> Metadata:
        fields = self._fields(self._unpickle(), "Metadata")
        described = fields.get("state_dict_metadata")
        places = fields.get("storage_data")
        if not isinstance(described, dict) or not isinstance(places, dict):
            self._refuse("it does not list tensors and their places")
        self._places = places
        tensors, objects = {}, {}
        for name, entry in described.items():
            if not isinstance(name, str) or not name or len(name) > LONGEST_NAME:
                self._refuse("a tensor's name is not a short string")
            if isinstance(entry, Opaque) and entry.cls.name == "BytesStorageMetadata":
                objects[name] = self._place(name, None)
            else:
                tensors[name] = self._tensor(name, self._fields(entry, "TensorStorageMetadata"))
        return Metadata(tensors, objects)

    def _unpickle(self) -> Any:
        data = read_whole(self._path, limit=LIMITS.size)
        machine = _IndexMachine(data, 0, LIMITS)
        try:
            value = run(machine)
            if machine.position != len(data):
                raise PickleError(f"bytes follow its end at byte {machine.position}")
        except PickleError as error:
            remedy = _UNTRUSTED if "would" in str(error) else _COPY_AGAIN
            raise RejectedError(
                self._path, f"its pickle is refused {error}", remedy=remedy
            ) from None
        return value

    def _refuse(self, reason: str, name: str | None = None, remedy: str = _COPY_AGAIN) -> NoReturn:
        raise RejectedError(self._path, reason, remedy=remedy, tensor=name)

    def _fields(self, value: Any, kind: str, name: str | None = None) -> Mapping[Any, Any]:
        is_right = isinstance(value, Opaque) and value.cls.name == kind
        if not is_right or not isinstance(value.state, dict):
            self._refuse(f"it holds a {type_name(value)[:200]} where {kind} is due", name)
        fields: Mapping[Any, Any] = value.state
        return fields

    def _extents(self, value: Any, what: str, name: str) -> tuple[int, ...]:
        if not _is_extents(value):
            self._refuse(f"its {what} is no list of numbers", name)
        return tuple(value)

    def _tensor(self, name: str, fields: Mapping[Any, Any]) -> StoredTensor:
        shape = self._extents(fields.get("size"), "shape", name)
        dtype = self._dtype(fields.get("properties"), name)
        listed = fields.get("chunks")
        if not isinstance(listed, list):
            self._refuse("it has no list of chunks", name)
        chunks = []
        for entry in listed:
            part = self._fields(entry, "ChunkStorageMetadata", name)
            offsets = self._extents(part.get("offsets"), "chunk's offset", name)
            sizes = self._extents(part.get("sizes"), "chunk's shape", name)
            if len(offsets) != len(shape) or len(sizes) != len(shape):
                self._refuse("a chunk has another number of dimensions", name)
            box = tuple((o, o + s) for o, s in zip(offsets, sizes, strict=True))
            place = self._place(name, offsets)
            if size(box) * item_size(dtype) > place.length:
                self._refuse(f"the record of chunk {box} is too short for it", name)
            chunks.append(Chunk(box, place))
        fault = coverage_fault(shape, [(chunk.box, None) for chunk in chunks])
        if fault is not None:
            self._refuse(f"its chunks do not cover it exactly once: {fault}", name)
        return StoredTensor(name, shape, dtype, tuple(chunks))

    def _dtype(self, properties: Any, name: str) -> str:
        state = properties.state if isinstance(properties, Opaque) else None
        found = state.get("dtype") if isinstance(state, dict) else None
        if isinstance(state, tuple) and state:
            found = state[0]
        dtype = TORCH_DTYPES.get(found.name) if isinstance(found, TorchDtype) else None
        if dtype is None:
            self._refuse("its element type is not one that we read", name)
        return dtype

    def _place(self, name: str, offset: tuple[int, ...] | None) -> Place:
        entry = self._places.get(_key(name, offset))
        if entry is None:
            chunk = "" if offset is None else f" of the chunk at {list(offset)}"
            self._refuse(f"the place{chunk} is not stated", name)
        fields = self._fields(entry, "_StorageInfo", name)
        file, where = fields.get("relative_path"), (fields.get("offset"), fields.get("length"))
        if not isinstance(file, str) or name_fault(file) is not None:
            self._refuse("its file's name is not a plain one", name)
        at, length = self._extents(where, "place in the file", name)
        if fields.get("transform_descriptors"):
            self._refuse("its record is packed", name, "save it without compression")
        if at + length > self._size(file, name):
            raise RejectedError(
                self._folder / file,
                f"it has {self._size(file, name)} bytes, and the tensor ends at {at + length}",
                remedy="copy the file again, it is truncated",
                tensor=name,
            )
        return Place(self._folder / file, at, length)

    def _size(self, file: str, name: str) -> int:
        if file not in self._sizes:
            path = self._folder / file
            if not path.exists() and not path.is_symlink():
                remedy = "copy the file that is missing"
                raise RejectedError(path, "there is no such file", remedy=remedy, tensor=name)
            with RegularFile(path, cache_links=True).open() as opened:
                self._sizes[file] = opened.size
        return self._sizes[file]
