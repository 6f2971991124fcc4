"""Hostile safetensors files, built when a test asks for them. Each has a word of its refusal."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Build = Callable[[], bytes]


def tensor(dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def file(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


ZEROS = b"\0" * 16
_W = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'


def _many(item: bytes) -> bytes:
    return b'{"a":[' + b",".join([item] * 4_000_000) + b"]}"


def _wide() -> bytes:
    return b'{"__metadata__":{"a":"' + "\U0001f600".encode() * 8_000_000 + b'"}}'


def _million() -> bytes:
    entry = '"t%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    return ("{" + ",".join([entry % i for i in range(1_000_000)]) + "}").encode()


REFUSED: dict[str, tuple[str, Build]] = {
    "header length 2^63+2": ("claims", lambda: file(b"{}", length=(1 << 63) + 2)),
    "header 100 MB + 1": ("claims", lambda: file(b'{"a":' + b" " * 100_000_001 + b"{}}")),
    "header longer than the file": ("claims", lambda: file(b"{}", length=1000)),
    "header of length 0": ("does not begin", lambda: file(b"", ZEROS)),
    "truncated data": ("the file has", lambda: file({"w": tensor()}, ZEROS[:12])),
    "trailing bytes": ("the file has", lambda: file({"w": tensor()}, ZEROS + b"PK\3\4polyglot")),
    "PK polyglot": ("claims", lambda: b"PK\3\4\x14\0\0\0" + file({"w": tensor()}, ZEROS)),
    "overlap": (
        "overlaps",
        lambda: file({"a": tensor(), "b": tensor(offsets=(8, 24))}, ZEROS + ZEROS[:8]),
    ),
    "hole": ("hole", lambda: file({"a": tensor(), "b": tensor(offsets=(32, 48))}, ZEROS * 3)),
    "duplicate key": ("twice", lambda: file(_W[:-1] + b"," + _W[1:], ZEROS)),
    "product overflow": (
        "overflows",
        lambda: file({"w": tensor(shape=(4194305, 4194305, 211106198978564))}, ZEROS),
    ),
    "shape against bytes": ("takes", lambda: file({"w": tensor(shape=(1000, 1000))}, ZEROS)),
    "zero times huge": (
        "overflows",
        lambda: file({"w": tensor(shape=(0, 1 << 62, 1 << 62), offsets=(0, 0))}),
    ),
    "negative offsets": ("whole numbers", lambda: file({"w": tensor(offsets=(-16, 0))}, ZEROS)),
    "begin after end": ("takes", lambda: file({"w": tensor(offsets=(16, 0))}, ZEROS)),
    "unknown dtype": ("not known", lambda: file({"w": tensor(dtype="F99")}, ZEROS)),
    "dtype is a list": ("not known", lambda: file({"w": tensor(dtype=["F32"])}, ZEROS)),
    "4-bit dtype": ("not known", lambda: file({"w": tensor(dtype="F4", shape=(32,))}, ZEROS)),
    "not UTF-8": ("UTF-8", lambda: file(_W.replace(b"w", b"\xff\xfe"), ZEROS)),
    "deep JSON": (
        "nested",
        lambda: file(b'{"__metadata__":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    ),
    "a million arrays": (
        "values",
        lambda: file(_many(b"[]")),
    ),
    "metadata not strings": (
        "__metadata__",
        lambda: file({"__metadata__": {"a": 1}, "w": tensor()}, ZEROS),
    ),
    "metadata not an object": (
        "__metadata__",
        lambda: file({"__metadata__": ["a"], "w": tensor()}, ZEROS),
    ),
    "NaN in a shape": ("NaN", lambda: file(_W.replace(b"[4]", b"[NaN]"), ZEROS)),
    "float in a shape": ("whole numbers", lambda: file({"w": tensor(shape=(4.0,))}, ZEROS)),
    "true in a shape": ("whole numbers", lambda: file({"w": tensor(shape=(True,))}, ZEROS)),
    "5000 digits": ("JSON", lambda: file(_W.replace(b"[4]", b"[" + b"9" * 5000 + b"]"), ZEROS)),
    "65 dimensions": ("64", lambda: file({"w": tensor(shape=(1,) * 64 + (4,))}, ZEROS)),
    "extra member": ("members", lambda: file({"w": tensor() | {"evil": 1}}, ZEROS)),
    "missing member": ("members", lambda: file({"w": {"dtype": "F32", "shape": [4]}}, ZEROS)),
    "tensor is a list": ("members", lambda: file({"w": [1, 2]}, ZEROS)),
    "leading space": ("does not begin", lambda: file(b"   " + _W, ZEROS)),
    "header is a list": ("does not begin", lambda: file(b"[]")),
    "a million tensors": (
        "values",
        lambda: file(_million()),
    ),
    "wide text": (
        "ASCII",
        lambda: file(_wide()),
    ),
    "many numbers": ("values", lambda: file(_many(b"1"))),
    "empty file": ("fewer than", lambda: b""),
}

UGLY_NAMES = (
    "w\x1b]0;pwn\x07\x1b[2J\n../../etc/passwd\u202e",
    "<script>alert(1)</script>",
    "=cmd()|' /C calc'!A0",
    "\ud800 lone surrogate",
    "nul\0",
    "long" * 250_000,
    "a" + "." * 3000,
)
"""Names that are allowed, and must be harmless when printed."""


def ugly() -> bytes:
    """A good file with ugly names."""
    members = {name: tensor("U8", (1,), (i, i + 1)) for i, name in enumerate(UGLY_NAMES)}
    return file(members, b"\0" * len(UGLY_NAMES))


def write_all(folder: Path) -> list[Path]:
    """All refused files, with names that tell nothing."""
    paths = []
    for number, (_, build) in enumerate(REFUSED.values()):
        path = folder / f"attack-{number:02d}.safetensors"
        path.write_bytes(build())
        paths.append(path)
    return paths
