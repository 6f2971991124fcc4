"""Turn what a pickle calls into plain values or inert records, one small function a name."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from mds_ckpt.pickles.records import (
    EnumRecord,
    Global,
    Namespace,
    NumpyArray,
    NumpyDtype,
    Opaque,
    StorageRef,
    TensorRef,
    TorchDtype,
)

__all__ = ["TORCH_DTYPES", "BuildError", "Host", "apply_state", "construct", "storage_reference"]

TORCH_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "float64": "F64",
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "int64": "I64",
        "int32": "I32",
        "int16": "I16",
        "int8": "I8",
        "uint64": "U64",
        "uint32": "U32",
        "uint16": "U16",
        "uint8": "U8",
        "bool": "BOOL",
        "complex64": "C64",
    }
)
"""torch's element types that we read, with safetensors' names for them."""

_STORAGE_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "DoubleStorage": "F64",
        "FloatStorage": "F32",
        "HalfStorage": "F16",
        "BFloat16Storage": "BF16",
        "LongStorage": "I64",
        "IntStorage": "I32",
        "ShortStorage": "I16",
        "CharStorage": "I8",
        "ByteStorage": "U8",
        "BoolStorage": "BOOL",
        "ComplexFloatStorage": "C64",
        "UntypedStorage": "U8",
        "_UntypedStorage": "U8",
    }
)
_SIZES = MappingProxyType({"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4})
_HALF_SIZES = MappingProxyType({"F16": 2, "BF16": 2, "I16": 2, "U16": 2})
_MAX_DIMS = 64
_MAX_COUNT = 1 << 62


class BuildError(ValueError):
    """A pickle builds something that can't be right."""


class Host(Protocol):
    """What the builders need from the pickle machine."""

    def key(self, value: Any) -> Hashable:
        """``value`` if it may be a dictionary key, else an error."""

    def charge(self, amount: int) -> None:
        """Count work that is larger than the operation that asked for it."""


Builder = Callable[[Host, tuple[Any, ...]], Any]


def item_size(dtype: str) -> int:
    """Bytes of one element."""
    return _SIZES.get(dtype) or _HALF_SIZES.get(dtype) or 1


def construct(host: Host, target: Global, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What calling ``target`` would have given: a plain value, or a record of the call."""
    builder = _BUILDERS.get((target.module, target.name))
    if builder is None:
        return _record(target, args, kwargs)
    if kwargs:
        raise BuildError(f"{target} is called with keyword arguments")
    return builder(host, args)


def _record(target: Global, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    is_enum = "enum" in target.module.lower() or target.name.endswith("Enum")
    if is_enum and len(args) == 1 and isinstance(args[0], int | str) and not kwargs:
        return EnumRecord(target, args[0])
    return Opaque(target, args, dict(kwargs))


def apply_state(host: Host, target: Any, state: Any) -> None:
    """What BUILD would have done to ``target``, for the records that may have a state."""
    if isinstance(target, NumpyArray):
        _fill_array(host, target, state)
    elif isinstance(target, NumpyDtype):
        _set_byte_order(target, state)
    elif isinstance(target, Namespace):
        target.fields.update(_fields(host, state))
    elif isinstance(target, Opaque):
        target.state = _merge_slots(host, state)
    elif not isinstance(target, TensorRef | dict):
        # Attributes of an OrderedDict (a module's _metadata) or a Parameter say nothing of values.
        raise BuildError(f"a state is set on a {type(target).__name__}, which has none")


def _fields(host: Host, state: Any) -> dict[str, Any]:
    if isinstance(state, dict) and all(isinstance(name, str) for name in state):
        host.charge(len(state))
        return state
    raise BuildError("the fields of a namespace are not a dictionary with names")


def _merge_slots(host: Host, state: Any) -> Any:
    """Objects with slots store (dict or None, slots); attribute access doesn't care which."""
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        parts = [part for part in state if isinstance(part, dict)]
        host.charge(sum(map(len, parts)))
        return {key: value for part in parts for key, value in part.items()}
    return state


# Tensors


def storage_reference(pid: Any) -> StorageRef:
    """The storage that a persistent id names: ("storage", type, key, device, length)."""
    if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage":
        raise BuildError("a persistent id does not name a storage")
    kind, key, location, numel = pid[1:5]
    if len(pid) == 6 and pid[5] is not None:
        raise BuildError("a storage is a view of another one, which torch stopped writing in 2017")
    if not isinstance(kind, Global) or not kind.module.startswith("torch"):
        raise BuildError("a storage's type is not one of torch's")
    dtype = _STORAGE_DTYPES.get(kind.name)
    if dtype is None:
        raise BuildError(f"the element type of {kind} is not one that we read")
    if not isinstance(key, str) or not isinstance(location, str):
        raise BuildError("a storage's key or device is not a string")
    return StorageRef(dtype, key, location, _count(numel, "the number of elements of a storage"))


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise BuildError(f"{what} is {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    return (
        str(value)
        if type(value) is int and value.bit_length() < 256
        else f"a {type(value).__name__}"
    )


def _extents(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or len(value) > _MAX_DIMS:
        raise BuildError(f"{what} is not a short tuple of numbers")
    return tuple(_count(extent, f"{what}'s entry") for extent in value)


def _tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, *, dtype: str | None = None
) -> TensorRef:
    if not isinstance(storage, StorageRef):
        raise BuildError("a tensor is built on something that is not a storage")
    dtype = dtype or storage.dtype
    available = storage.numel * item_size(storage.dtype) // item_size(dtype)
    start = _count(offset, "the storage offset of a tensor")
    extents, steps = _extents(shape, "a tensor's shape"), _extents(stride, "a tensor's stride")
    if len(extents) != len(steps):
        raise BuildError(f"a tensor has {len(extents)} dimensions but {len(steps)} strides")
    tensor = TensorRef(storage, start, extents, steps, dtype)
    count = tensor.numel
    last = start + sum((extent - 1) * step for extent, step in zip(extents, steps, strict=True))
    if count and (last >= available or count > available):
        raise BuildError(
            f"a tensor of shape {list(extents)}, stride {list(steps)} and offset {start} does not "
            f"fit its storage '{storage.key}' of {available} elements"
        )
    return tensor


def _rebuild_tensor(host: Host, args: tuple[Any, ...]) -> TensorRef:
    if len(args) < 4:
        raise BuildError(f"a tensor is built from {len(args)} arguments")
    return _tensor(*args[:4])


def _rebuild_tensor_v3(host: Host, args: tuple[Any, ...]) -> TensorRef:
    if len(args) < 7 or not isinstance(args[6], TorchDtype):
        raise BuildError("a tensor's element type is missing")
    dtype = TORCH_DTYPES.get(args[6].name)
    if dtype is None:
        raise BuildError(f"the element type {args[6]} is not one that we read")
    return _tensor(*args[:4], dtype=dtype)


def _rebuild_parameter(host: Host, args: tuple[Any, ...]) -> TensorRef:
    if not args or not isinstance(args[0], TensorRef):
        raise BuildError("a parameter is built on something that is not a tensor")
    return args[0]


def _rebuild_from_type(host: Host, args: tuple[Any, ...]) -> TensorRef:
    if len(args) < 3 or not isinstance(args[0], Global) or not isinstance(args[2], tuple):
        raise BuildError("a tensor subclass is stored in an unknown way")
    inner = _BUILDERS.get((args[0].module, args[0].name))
    if inner not in (_rebuild_tensor, _rebuild_tensor_v3, _rebuild_parameter):
        raise BuildError(f"a tensor subclass is built by {args[0]}, which is unknown")
    built: TensorRef = inner(host, args[2])
    return built


# numpy

_DTYPE_CODE = re.compile(r"[<>=|]?(b1|[iu][1248]|f[248]|c(8|16)|[SUV]\d{1,6})")


def _numpy_dtype(host: Host, args: tuple[Any, ...]) -> NumpyDtype:
    code = args[0] if args else None
    if not isinstance(code, str) or _DTYPE_CODE.fullmatch(code) is None:
        raise BuildError("a numpy array has an element type that is not a plain number or string")
    return NumpyDtype(code)


def _set_byte_order(dtype: NumpyDtype, state: Any) -> None:
    if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
        raise BuildError("a numpy element type has an unknown state")
    if len(state) > 4 and (state[3] is not None or state[4] is not None):
        raise BuildError("a numpy array has an element type with fields")
    dtype.code = state[1] + dtype.code.lstrip("<>=|")


def _dtype_size(code: str) -> int:
    kind, width = code.lstrip("<>=|")[0], int(code.lstrip("<>=|")[1:])
    return 4 * width if kind == "U" else width


def _empty_array(host: Host, args: tuple[Any, ...]) -> NumpyArray:
    if not args or args[0] != Global("numpy", "ndarray"):
        raise BuildError("a numpy array of an unknown class")
    return NumpyArray()


def _fill_array(host: Host, array: NumpyArray, state: Any) -> None:
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], NumpyDtype):
        raise BuildError("a numpy array has an unknown state")
    _, shape, dtype, fortran, raw = state
    _set_array(array, shape, dtype, fortran_order=bool(fortran), raw=raw)


def _set_array(
    array: NumpyArray, shape: Any, dtype: NumpyDtype, *, fortran_order: bool, raw: Any
) -> None:
    extents = _extents(shape, "a numpy array's shape")
    size = _dtype_size(dtype.code)
    for extent in extents:
        size *= extent
    if not isinstance(raw, bytes) or len(raw) != size:
        raise BuildError(f"a numpy array of shape {list(extents)} does not hold {size} bytes")
    array.dtype, array.shape, array.data = dtype.code, extents, raw
    array.fortran_order = fortran_order


def _numpy_scalar(host: Host, args: tuple[Any, ...]) -> Any:
    if len(args) != 2 or not isinstance(args[0], NumpyDtype):
        raise BuildError("a numpy number is stored in an unknown way")
    array = NumpyArray()
    _set_array(array, (1,), args[0], fortran_order=False, raw=args[1])
    return array.numpy()[0].item()


def _array_from_buffer(host: Host, args: tuple[Any, ...]) -> NumpyArray:
    if len(args) != 4 or not isinstance(args[1], NumpyDtype):
        raise BuildError("a numpy array is stored in an unknown way")
    array = NumpyArray()
    _set_array(array, args[2], args[1], fortran_order=args[3] == "F", raw=args[0])
    return array


# Python's own


def _ordered_dict(host: Host, args: tuple[Any, ...]) -> dict[Any, Any]:
    if not args:
        return {}
    pairs = args[0]
    if len(args) != 1 or not isinstance(pairs, list | tuple | dict):
        raise BuildError("a dictionary is built from something that is not a list of pairs")
    host.charge(len(pairs))
    if isinstance(pairs, dict):
        return dict(pairs)
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise BuildError("a dictionary is built from something that is not a list of pairs")
    return {host.key(key): value for key, value in pairs}


def _default_dict(host: Host, args: tuple[Any, ...]) -> dict[Any, Any]:
    return _ordered_dict(host, args[1:])


def _sequence(host: Host, args: tuple[Any, ...]) -> Sequence[Any]:
    if not args:
        return ()
    if not isinstance(args[0], list | tuple):
        raise BuildError("a collection is built from something that is not a list")
    host.charge(len(args[0]))
    return args[0]


def _list(host: Host, args: tuple[Any, ...]) -> list[Any]:
    return list(_sequence(host, args))


def _set(host: Host, args: tuple[Any, ...]) -> set[Any]:
    return {host.key(item) for item in _sequence(host, args)}


def _size(host: Host, args: tuple[Any, ...]) -> tuple[int, ...]:
    return _extents(_sequence(host, args), "a torch.Size")


def _encode(host: Host, args: tuple[Any, ...]) -> bytes:
    if (
        not args
        or not isinstance(args[0], str)
        or args[1:] not in (("latin1",), ("latin-1",), ("utf-8",))
    ):
        raise BuildError("bytes are stored in an unknown encoding")
    host.charge(len(args[0]))
    try:
        return args[0].encode(args[1])
    except UnicodeEncodeError:
        raise BuildError(f"a string is not {args[1]}") from None


def _bytes(host: Host, args: tuple[Any, ...]) -> bytes:
    if not args:
        return b""
    if len(args) == 1 and isinstance(args[0], bytes):
        host.charge(len(args[0]))
        return args[0]
    return _encode(host, args)


def _device(host: Host, args: tuple[Any, ...]) -> str:
    if not 1 <= len(args) <= 2 or not isinstance(args[0], str):
        raise BuildError("a torch.device is stored in an unknown way")
    return args[0] if len(args) == 1 else f"{args[0]}:{_count(args[1], 'a device number')}"


def _namespace(host: Host, args: tuple[Any, ...]) -> Namespace:
    if args:
        raise BuildError("a namespace is built with arguments")
    return Namespace()


def _reconstructed(host: Host, args: tuple[Any, ...]) -> Any:
    if len(args) != 3 or not isinstance(args[0], Global):
        raise BuildError("an object of an old class is stored in an unknown way")
    if args[0] in (Global("argparse", "Namespace"), Global("types", "SimpleNamespace")):
        return Namespace()
    return Opaque(args[0], args[2:] if args[2] is not None else ())


_BUILDERS: Mapping[tuple[str, str], Builder] = MappingProxyType(
    {
        ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
        ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_v3,
        ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
        ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
        ("torch", "Size"): _size,
        ("torch", "device"): _device,
        ("argparse", "Namespace"): _namespace,
        ("types", "SimpleNamespace"): _namespace,
        ("collections", "OrderedDict"): _ordered_dict,
        ("collections", "Counter"): _ordered_dict,
        ("collections", "defaultdict"): _default_dict,
        ("collections", "deque"): _list,
        ("_codecs", "encode"): _encode,
        ("numpy", "dtype"): _numpy_dtype,
        ("copyreg", "_reconstructor"): _reconstructed,
        ("copy_reg", "_reconstructor"): _reconstructed,
    }
    | {
        (f"numpy.{core}.{module}", name): builder
        for core in ("core", "_core")
        for module, name, builder in (
            ("multiarray", "_reconstruct", _empty_array),
            ("multiarray", "scalar", _numpy_scalar),
            ("numeric", "_frombuffer", _array_from_buffer),
        )
    }
    | {
        (module, name): builder
        for module in ("builtins", "__builtin__")
        for name, builder in (
            ("set", _set),
            ("frozenset", _set),
            ("list", _list),
            ("bytes", _bytes),
            ("bytearray", _bytes),
        )
    }
)
