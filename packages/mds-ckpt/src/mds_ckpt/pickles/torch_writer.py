"""Write files that ``torch.load`` reads, without torch: a pickle by hand, then the tensors.

Classes are written as names, so DeepSpeed's and Megatron's own can be stored where they are not
installed. Tensors may be promises (anything with shape, dtype and ``numpy()``): each is asked for
its values when its turn comes, so memory holds one at a time.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Protocol

import numpy as np

from mds_ckpt.files.file_operations import REAL, FileOperations
from mds_ckpt.files.writeback import Writeback
from mds_ckpt.files.zip_writer import Output, ZipWriter
from mds_ckpt.pickles.records import EnumRecord, Global, Namespace, NumpyArray, Opaque, TorchDtype
from mds_ckpt.tensors.dtype import dtype_name

__all__ = [
    "ArrayLike",
    "StreamedArray",
    "ordered",
    "pickled",
    "save_torch_file",
    "size",
    "write_torch",
]

_STORAGES: Mapping[str, str] = MappingProxyType(
    {
        "F64": "DoubleStorage",
        "F32": "FloatStorage",
        "F16": "HalfStorage",
        "BF16": "BFloat16Storage",
        "I64": "LongStorage",
        "I32": "IntStorage",
        "I16": "ShortStorage",
        "I8": "CharStorage",
        "U8": "ByteStorage",
        "BOOL": "BoolStorage",
        "C64": "ComplexFloatStorage",
    }
)
_BLOCK = 1 << 24


class ArrayLike(Protocol):
    """A tensor whose values are asked for once, when they are written.

    One that also has ``blocks()``, as a :class:`StreamedArray`, is never held whole.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""

    @property
    def dtype(self) -> Any:
        """Numpy element type."""

    def numpy(self) -> np.ndarray[Any, np.dtype[Any]]:
        """The values."""


class StreamedArray(ABC):
    """A long flat tensor that is written block by block and never held whole."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Extents."""

    @property
    @abstractmethod
    def dtype(self) -> Any:
        """Numpy element type."""

    @abstractmethod
    def blocks(self) -> Iterator[np.ndarray[Any, np.dtype[Any]]]:
        """The values in order."""


def ordered(pairs: Mapping[Any, Any]) -> Opaque:
    """A ``collections.OrderedDict`` with these items."""
    return Opaque(Global("collections", "OrderedDict"), items=list(pairs.items()))


def size(shape: Sequence[int]) -> Opaque:
    """A ``torch.Size``."""
    return Opaque(Global("torch", "Size"), (tuple(shape),))


def save_torch_file(
    path: Path, value: Any, *, operations: FileOperations = REAL, sync: bool = True
) -> None:
    """Write ``value`` as ``torch.save`` would. Refuses to replace a file.

    Args:
        path: The new file.
        value: Containers, numbers, strings, records of ``mds_ckpt.pickles.records``, arrays.
        operations: The disk.
        sync: Force the file to the disk; otherwise the caller does.
    """
    with operations.create(path) as stream:
        disk = _Disk(stream, operations)
        write_torch(disk, value, root=path.stem or "archive")
        if sync:
            operations.sync(stream)
        else:
            disk.complete()


def write_torch(output: Output, value: Any, *, root: str = "archive") -> None:
    """Write what ``torch.save`` would, at the place where ``output`` is; offsets count from there.

    Args:
        output: Where the bytes go, in order.
        value: As in ``save_torch_file``.
        root: Name of the archive's folder.
    """
    pickler = _Pickler()
    pickler.write(value)
    writer = ZipWriter(output, root=root)
    writer.add("data.pkl", [b"\x80\x02" + b"".join(pickler.parts) + b"."])
    writer.add("byteorder", [b"little"])
    for key, array in enumerate(pickler.arrays):
        writer.add(f"data/{key}", _blocks(array))
    writer.add("version", [b"3\n"])
    writer.close()


def pickled(value: Any) -> bytes:
    """A pickle of ``value``, which must hold no tensors, by itself."""
    pickler = _Pickler()
    pickler.write(value)
    if pickler.arrays:
        raise TypeError("a lone pickle holds no tensors")
    return b"\x80\x02" + b"".join(pickler.parts) + b"."


class _Disk:
    """A file as the zip writer sees it; every write goes through the operations."""

    def __init__(self, stream: BinaryIO, operations: FileOperations) -> None:
        self._stream = stream
        self._operations = operations
        self._writeback = Writeback(stream)

    def write(self, data: bytes | memoryview) -> None:
        self._operations.write(self._stream, memoryview(data))
        self._writeback.wrote(len(data))

    def complete(self) -> None:
        """Let the disk begin with the rest."""
        self._writeback.complete()


def _blocks(array: np.ndarray[Any, np.dtype[Any]] | ArrayLike) -> Iterable[memoryview]:
    if (blocks := getattr(array, "blocks", None)) is not None:
        return map(_bytes_of, blocks())
    values = np.asarray(array) if isinstance(array, np.ndarray | np.generic) else array.numpy()
    view = _bytes_of(values)
    return [view[at : at + _BLOCK] for at in range(0, len(view), _BLOCK)]


def _bytes_of(values: np.ndarray[Any, np.dtype[Any]]) -> memoryview:
    flat: memoryview = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    return flat


class _Pickler:
    """Collects opcodes in ``parts`` and the arrays, in the order of their storage keys."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.arrays: list[Any] = []

    def write(self, value: Any) -> None:
        for kind, method in _WRITERS:
            if isinstance(value, kind):
                method(self, value)
                return
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            _write_tensor(self, value)
            return
        raise TypeError(f"a {type(value).__name__} has no place in a torch file")

    def emit(self, *parts: bytes) -> None:
        self.parts.extend(parts)


def _write_constant(out: _Pickler, value: object) -> None:
    out.emit(b"N" if value is None else b"\x88" if value else b"\x89")


def _write_int(out: _Pickler, value: int) -> None:
    if 0 <= value < 256:
        out.emit(b"K", bytes([value]))
    elif -(1 << 31) <= value < 1 << 31:
        out.emit(b"J", struct.pack("<i", value))
    else:
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        out.emit(b"\x8a", bytes([len(raw)]), raw)


def _write_float(out: _Pickler, value: float) -> None:
    out.emit(b"G", struct.pack(">d", value))


def _write_str(out: _Pickler, value: str) -> None:
    raw = value.encode("utf-8", "surrogatepass")
    out.emit(b"X", struct.pack("<I", len(raw)), raw)


def _write_bytes(out: _Pickler, value: bytes) -> None:
    _write_global(out, Global("_codecs", "encode"))
    _write_tuple(out, (value.decode("latin1"), "latin1"))
    out.emit(b"R")


def _write_list(out: _Pickler, value: list[Any]) -> None:
    out.emit(b"](")
    for item in value:
        out.write(item)
    out.emit(b"e")


def _write_tuple(out: _Pickler, value: tuple[Any, ...]) -> None:
    if len(value) > 3:
        out.emit(b"(")
    for item in value:
        out.write(item)
    out.emit((b")", b"\x85", b"\x86", b"\x87")[len(value)] if len(value) <= 3 else b"t")


def _write_dict(out: _Pickler, value: Mapping[Any, Any]) -> None:
    out.emit(b"}")
    _write_items(out, list(value.items()))


def _write_items(out: _Pickler, pairs: list[tuple[Any, Any]]) -> None:
    out.emit(b"(")
    for key, item in pairs:
        out.write(key)
        out.write(item)
    out.emit(b"u")


def _write_set(out: _Pickler, value: set[Any]) -> None:
    _write_global(out, Global("__builtin__", "set"))
    _write_tuple(out, (sorted(value, key=repr),))
    out.emit(b"R")


def _write_global(out: _Pickler, value: Global) -> None:
    out.emit(f"c{value.module}\n{value.name}\n".encode())


def _write_torch_dtype(out: _Pickler, value: TorchDtype) -> None:
    _write_global(out, Global("torch", value.name))


def _write_enum(out: _Pickler, value: EnumRecord) -> None:
    _write_opaque(out, Opaque(value.cls, (value.value,)))


def _write_namespace(out: _Pickler, value: Namespace) -> None:
    _write_global(out, Global("argparse", "Namespace"))
    out.emit(b")\x81")
    _write_dict(out, value.fields)
    out.emit(b"b")


def _write_opaque(out: _Pickler, value: Opaque) -> None:
    _write_global(out, value.cls)
    _write_tuple(out, value.args)
    # A class without arguments is made by __new__, as pickle itself does; a call needs REDUCE.
    out.emit(b"R" if value.args or value.items else b"\x81")
    if value.items:
        _write_items(out, value.items)
    if value.state is not None:
        out.write(value.state)
        out.emit(b"b")


def _write_numpy(out: _Pickler, value: NumpyArray) -> None:
    _write_global(out, Global("numpy.core.multiarray", "_reconstruct"))
    _write_tuple(out, (Global("numpy", "ndarray"), (0,), b"b"))
    out.emit(b"R(K\x01")
    _write_tuple(out, value.shape)
    code = value.dtype.lstrip("<>=|")
    _write_global(out, Global("numpy", "dtype"))
    _write_tuple(out, (code, False, True))
    out.emit(b"R(K\x03")
    _write_str(out, value.dtype[0] if value.dtype[0] in "<>|" else "|")
    out.emit(b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb")
    _write_constant(out, value.fortran_order)
    _write_bytes(out, value.data)
    out.emit(b"tb")


def _write_tensor(out: _Pickler, value: np.ndarray[Any, np.dtype[Any]] | ArrayLike) -> None:
    name = dtype_name(np.dtype(value.dtype))
    shape = tuple(value.shape)
    strides, count = list[int](), 1
    for extent in reversed(shape):
        strides.append(count)
        count *= extent
    _write_global(out, Global("torch._utils", "_rebuild_tensor_v2"))
    out.emit(b"((")
    for item in ("storage", Global("torch", _STORAGES[name]), str(len(out.arrays)), "cpu", count):
        out.write(item)
    out.emit(b"tQ")
    _write_int(out, 0)
    _write_tuple(out, shape)
    _write_tuple(out, tuple(reversed(strides)))
    out.emit(b"\x89")
    _write_global(out, Global("collections", "OrderedDict"))
    out.emit(b")Rt", b"R")
    out.arrays.append(value)


_WRITERS: tuple[tuple[Any, Any], ...] = (
    ((bool, type(None)), _write_constant),
    (int, _write_int),
    (float, _write_float),
    (str, _write_str),
    (bytes, _write_bytes),
    (list, _write_list),
    (tuple, _write_tuple),
    (Namespace, _write_namespace),
    (dict, _write_dict),
    ((set, frozenset), _write_set),
    (Global, _write_global),
    (TorchDtype, _write_torch_dtype),
    (EnumRecord, _write_enum),
    (Opaque, _write_opaque),
    (NumpyArray, _write_numpy),
    (np.ndarray, _write_tensor),
)
