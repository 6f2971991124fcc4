"""What a pickle's global names mean to us: known, inert, or the sign of an attack.

Nothing is imported either way. The verdict decides whether a file is read or refused, and what
``scan`` prints.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Literal

__all__ = ["Verdict", "judge"]

Verdict = Literal["known", "inert", "function", "dangerous"]

_DTYPES = """
float64 float32 float16 bfloat16 complex64 complex128 int64 int32 int16 int8 uint8 uint16 uint32
uint64 bool float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz quint8 qint8 qint32
"""
_STORAGES = """
DoubleStorage FloatStorage HalfStorage BFloat16Storage LongStorage IntStorage ShortStorage
CharStorage ByteStorage BoolStorage ComplexFloatStorage ComplexDoubleStorage UntypedStorage
TypedStorage
"""
_BUILTINS = """
set frozenset bytearray bytes complex slice range xrange object list dict tuple int long float str
unicode bool
"""

KNOWN: frozenset[tuple[str, str]] = frozenset(
    [("torch", name) for name in f"{_DTYPES} {_STORAGES} Size device Tensor".split()]
    + [("torch.cuda", name) for name in _STORAGES.split()]
    + [("torch.storage", name) for name in ("UntypedStorage", "TypedStorage", "_UntypedStorage")]
    + [
        ("torch._utils", "_rebuild_tensor"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_tensor_v3"),
        ("torch._utils", "_rebuild_parameter"),
        ("torch._utils", "_rebuild_parameter_with_state"),
        ("torch._tensor", "_rebuild_from_type_v2"),
        ("torch.nn.parameter", "Parameter"),
        ("argparse", "Namespace"),
        ("types", "SimpleNamespace"),
        ("collections", "OrderedDict"),
        ("collections", "defaultdict"),
        ("collections", "Counter"),
        ("collections", "deque"),
        ("_codecs", "encode"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("copyreg", "_reconstructor"),
        ("copy_reg", "_reconstructor"),
        ("deepspeed.utils.tensor_fragment", "fragment_address"),
        ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
        ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
        ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
        ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"),
    ]
    + [
        (f"numpy.{core}.{module}", name)
        for core in ("core", "_core")
        for module, name in (
            ("multiarray", "_reconstruct"),
            ("multiarray", "scalar"),
            ("numeric", "_frombuffer"),
        )
    ]
    + [(module, name) for module in ("builtins", "__builtin__") for name in _BUILTINS.split()]
)

# Functions that real checkpoints call or name, and that are kept as records.
_INERT: frozenset[tuple[str, str]] = frozenset(
    [
        ("torch._utils", "_rebuild_meta_tensor_no_storage"),
        ("torch._utils", "_rebuild_device_tensor_from_numpy"),
        ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"),
        ("torch._utils", "_rebuild_sparse_tensor"),
        ("torch._utils", "_rebuild_nested_tensor"),
        ("torch._utils", "_rebuild_qtensor"),
        ("torch._utils", "_rebuild_wrapper_subclass"),
        ("torch.serialization", "_get_layout"),
        ("torch", "strided"),
        ("torch", "contiguous_format"),
        ("torch", "preserve_format"),
        ("torch", "per_tensor_affine"),
        ("numpy.random._pickle", "__randomstate_ctor"),
        ("numpy.random._pickle", "__generator_ctor"),
        ("numpy.random._pickle", "__bit_generator_ctor"),
        ("datetime", "datetime"),
        ("datetime", "date"),
        ("datetime", "time"),
        ("datetime", "timedelta"),
        ("datetime", "timezone"),
        ("decimal", "Decimal"),
        ("fractions", "Fraction"),
        ("uuid", "UUID"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
        ("pathlib", "PurePosixPath"),
        ("pathlib", "PureWindowsPath"),
        ("pathlib._local", "PosixPath"),
        ("pathlib._local", "WindowsPath"),
    ]
)

# Packages outside the standard library whose objects have no place in a checkpoint.
_DANGEROUS_PREFIXES = (
    "pip",
    "setuptools",
    "pkg_resources",
    "distutils",
    "cloudpickle",
    "dill",
    "joblib",
    "IPython",
    "torch.hub",
    "torch.jit",
    "torch.package",
    "torch.utils",
    "torch.serialization",
    "torch.testing",
    "torch._inductor",
    "torch._dynamo",
    "torch.distributed.rpc",
    "torch.storage",
    "numpy.f2py",
    "numpy.testing",
    "numpy.distutils",
    "numpy.lib",
    "deepspeed.ops",
    "deepspeed.launcher",
    "nt",
    "posix",
    "__builtin__",
    "commands",
    "cPickle",
)


@lru_cache(maxsize=1024)
def judge(module: str, name: str) -> Verdict:
    """Say what a global is.

    Returns:
        ``known``: our own code builds it. ``inert``: a class or function kept as a record.
        ``function``: an unknown function; naming it is harmless, calling it is refused.
        ``dangerous``: the standard library or an installer; no checkpoint needs it.
    """
    if (module, name) in KNOWN:
        return "known"
    if (module, name) in _INERT:
        return "inert"
    top = module.split(".", 1)[0]
    if top in sys.stdlib_module_names and top != "__main__":
        return "dangerous"
    if any(module == prefix or module.startswith(prefix + ".") for prefix in _DANGEROUS_PREFIXES):
        return "dangerous"
    parts = name.split(".")
    if not all(part.isidentifier() for part in (*module.split("."), *parts)):
        return "dangerous"
    if all(part.lstrip("_")[:1].isupper() for part in parts):
        return "inert"
    return "function" if len(parts) == 1 else "dangerous"
