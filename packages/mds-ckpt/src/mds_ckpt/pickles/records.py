"""Inert records that stand for what a pickle would have built. Data only: nothing here runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "EnumRecord",
    "FragmentAddress",
    "Global",
    "Namespace",
    "NumpyArray",
    "NumpyDtype",
    "Opaque",
    "StorageRef",
    "SubparamShape",
    "TensorRef",
    "TorchDtype",
    "as_fragment",
    "as_subparam",
    "type_name",
]


@dataclass(frozen=True, slots=True)
class Global:
    """A name that the pickle refers to. It was not imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Opaque:
    """An object of a class that we do not build: its name, arguments and stored state."""

    cls: Global
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    state: Any = None
    items: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<{self.cls} (not built)>"

    def get(self, key: str, default: Any = None) -> Any:
        """The stored attribute ``key``, if the state is a dictionary that has it."""
        return self.state.get(key, default) if isinstance(self.state, dict) else default


@dataclass(slots=True, eq=False)
class Namespace(Mapping[str, Any]):
    """What ``argparse.Namespace`` or ``types.SimpleNamespace`` held: attribute names and values."""

    fields: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]

    def __iter__(self) -> Any:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __repr__(self) -> str:
        return f"<Namespace of {len(self.fields)} fields>"


@dataclass(frozen=True, slots=True)
class EnumRecord:
    """A member of an enumeration, by its class and stored value."""

    cls: Global
    value: int | str

    def __str__(self) -> str:
        return f"{self.cls}({self.value!r})"


@dataclass(frozen=True, slots=True)
class TorchDtype:
    """A ``torch.dtype`` by name, such as ``bfloat16``."""

    name: str

    def __str__(self) -> str:
        return f"torch.{self.name}"


@dataclass(slots=True, eq=False)
class NumpyDtype:
    """A numpy dtype by its array-protocol string, such as ``<u4``. Never an object dtype."""

    code: str


@dataclass(slots=True, eq=False)
class NumpyArray:
    """A numpy array as stored: element type, shape and the raw bytes, which were counted."""

    dtype: str = "|u1"
    shape: tuple[int, ...] = (0,)
    data: bytes = b""
    fortran_order: bool = False

    def numpy(self) -> np.ndarray[Any, np.dtype[Any]]:
        """A read-only array over the stored bytes."""
        import numpy as np

        order: Literal["F", "C"] = "F" if self.fortran_order else "C"
        return np.frombuffer(self.data, dtype=np.dtype(self.dtype)).reshape(self.shape, order=order)


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage inside a torch file: element type, key, device as written, number of elements."""

    dtype: str
    key: str
    location: str
    numel: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor inside a torch file: a strided view of a storage. Its bounds were checked."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """How many elements the tensor has."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True, slots=True)
class FragmentAddress:
    """DeepSpeed's ``fragment_address``: where a fragment lies in this rank's flat partition."""

    numel: int
    start: int


@dataclass(frozen=True, slots=True)
class SubparamShape:
    """DeepSpeed's ``SubparamShape``: a parameter made of sub-parameters along one dimension."""

    patterns: tuple[str, ...]
    shape: tuple[Any, ...]
    partition_dim: int


def as_fragment(value: object) -> FragmentAddress | None:
    """Read DeepSpeed's ``fragment_address`` from the record it was unpickled to."""
    if not isinstance(value, Opaque) or value.cls.name != "fragment_address":
        return None
    numel, start = value.get("numel"), value.get("start")
    if type(numel) is not int or type(start) is not int or numel < 0 or start < 0:
        return None
    return FragmentAddress(numel=numel, start=start)


def as_subparam(value: object) -> SubparamShape | None:
    """Read DeepSpeed's ``SubparamShape`` from the record it was unpickled to."""
    if not isinstance(value, Opaque) or value.cls.name != "SubparamShape":
        return None
    patterns, shape, dim = value.get("patterns"), value.get("shape"), value.get("partition_dim")
    if not isinstance(patterns, list | tuple) or not isinstance(shape, list | tuple):
        return None
    if type(dim) is not int:
        return None
    return SubparamShape(tuple(map(str, patterns)), tuple(shape), dim)


def type_name(value: object) -> str:
    """How a value is called in a message: foreign objects by their own class."""
    if isinstance(value, Opaque | EnumRecord):
        return str(value.cls)
    return type(value).__name__
