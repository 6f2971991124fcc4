"""The names of number types in safetensors files, their sizes, and their numpy counterparts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

ITEM_SIZES: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 1,
        "U8": 1,
        "I8": 1,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "F8_E8M0": 1,
        "I16": 2,
        "U16": 2,
        "F16": 2,
        "BF16": 2,
        "I32": 4,
        "U32": 4,
        "F32": 4,
        "I64": 8,
        "U64": 8,
        "F64": 8,
        "C64": 8,
    }
)
"""Bytes of one element, by safetensors' name."""

_NUMPY_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}
_ML_DTYPES_NAMES = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
_NAMES = MappingProxyType(
    {numpy_name: name for name, numpy_name in (_NUMPY_NAMES | _ML_DTYPES_NAMES).items()}
)
FLOATS = frozenset({"F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"})
"""Types of a model's weights, between which a conversion may cast."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The little-endian numpy type of safetensors' ``name``; KeyError if there is none."""
    import numpy as np

    if name in _ML_DTYPES_NAMES:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _ML_DTYPES_NAMES[name]))
        return found
    return np.dtype(_NUMPY_NAMES[name]).newbyteorder("<")


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The safetensors name of a numpy type; ValueError for types that the format can't hold."""
    name = _NAMES.get(dtype.name)  # numpy computes a type's name each time it is asked for
    if name is None:
        raise ValueError(
            f"numpy type {dtype} has no counterpart in safetensors files; "
            f"cast it to one of {', '.join(ITEM_SIZES)}"
        )
    return name
