"""Write distributed checkpoints by hand: ``.metadata`` byte by byte, records as torch files."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mds_ckpt.pickles.torch_writer import save_torch_file

MODULE = "torch.distributed.checkpoint.metadata"


@dataclass(frozen=True)
class Object:
    """An object of one of torch's classes and its state."""

    name: str
    state: Any = None
    module: str = MODULE


@dataclass(frozen=True)
class Size:
    extents: tuple[int, ...]


@dataclass(frozen=True)
class Name:
    module: str
    name: str


def _bytes(value: Any) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8a" + bytes([len(raw)]) + raw
    if isinstance(value, str):
        return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
    if isinstance(value, list):
        return b"](" + b"".join(map(_bytes, value)) + b"e"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_bytes, value)) + b"t"
    if isinstance(value, dict):
        return b"}(" + b"".join(_bytes(k) + _bytes(v) for k, v in value.items()) + b"u"
    if isinstance(value, Size):
        return b"ctorch\nSize\n(" + _bytes(value.extents) + b"tR"
    if isinstance(value, Name):
        return f"c{value.module}\n{value.name}\n".encode()
    head = f"c{value.module}\n{value.name}\n".encode() + b")\x81"
    return head if value.state is None else head + _bytes(value.state) + b"b"


def tensor_entry(
    shape: tuple[int, ...],
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]],
    *,
    dtype: str = "float32",
) -> Object:
    """What ``.metadata`` says of a tensor with these chunks (offsets and sizes)."""
    properties = (Name("torch", dtype), None, False, None, False)
    parts = [{"offsets": Size(offset), "sizes": Size(sizes)} for offset, sizes in chunks]
    return Object(
        "TensorStorageMetadata",
        {
            "properties": Object("TensorProperties", properties),
            "size": Size(shape),
            "chunks": [Object("ChunkStorageMetadata", part) for part in parts],
        },
    )


class Sample:
    """A distributed checkpoint in the making; ``pieces`` cut tensors along the first dimension."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.described: dict[str, Any] = {}
        self.places: list[tuple[Object, Object]] = []
        self.data = bytearray()

    def record(self, value: Any) -> tuple[int, int]:
        """Append a record with ``value``; returns its offset and length."""
        scratch = self.folder / "scratch.pt"
        save_torch_file(scratch, value)
        at, raw = len(self.data), scratch.read_bytes()
        scratch.unlink()
        self.data += raw
        return at, len(raw)

    def place(self, name: str, offset: Any, at: int, length: int, **more: Any) -> None:
        index = Object("MetadataIndex", {"fqn": name, "offset": offset, "index": None})
        state = {"relative_path": "__0_0.distcp", "offset": at, "length": length, **more}
        info = Object("_StorageInfo", state, "torch.distributed.checkpoint.filesystem")
        self.places.append((index, info))

    def tensor(self, name: str, array: Any, *, pieces: int = 1) -> None:
        chunks, first = [], 0
        for part in np.array_split(array, pieces):
            offset = (first, *[0] * (array.ndim - 1))
            self.place(name, Size(offset), *self.record(np.ascontiguousarray(part)))
            chunks.append((offset, part.shape))
            first += len(part)
        self.described[name] = tensor_entry(array.shape, chunks, dtype=str(array.dtype))

    def stored_object(self, name: str, value: Any) -> None:
        self.described[name] = Object("BytesStorageMetadata")
        self.place(name, None, *self.record(value))

    def write(self, *, marker: bool = True) -> Path:
        (self.folder / "__0_0.distcp").write_bytes(self.data)
        (self.folder / ".metadata").write_bytes(self.metadata())
        if marker:
            text = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
            (self.folder / "metadata.json").write_text(text)
        return self.folder

    def metadata(self) -> bytes:
        storage = b"}(" + b"".join(_bytes(k) + _bytes(v) for k, v in self.places) + b"u"
        head = f"c{MODULE}\nMetadata\n".encode() + b")\x81}("
        parts = _bytes("state_dict_metadata") + _bytes(self.described)
        return b"\x80\x02" + head + parts + _bytes("storage_data") + storage + b"ub."


def gpt(seed: int = 0, *, layers: int = 3, hidden: int = 8, vocab: int = 20) -> dict[str, Any]:
    """Stacked tensors of a small GPT without biases in its linears: 4 heads, 2 key/value heads."""
    random = np.random.default_rng(seed)
    shapes: Mapping[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (vocab, hidden),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (layers, hidden),
        "decoder.layers.self_attention.linear_qkv.weight": (layers, 2 * hidden, hidden),
        "decoder.layers.self_attention.linear_proj.weight": (layers, hidden, hidden),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": (layers, hidden),
        "decoder.layers.mlp.linear_fc1.weight": (layers, 24, hidden),
        "decoder.layers.mlp.linear_fc2.weight": (layers, hidden, 12),
        "decoder.final_layernorm.weight": (hidden,),
        "output_layer.weight": (vocab, hidden),
    }
    return {name: random.standard_normal(shape).astype("f4") for name, shape in shapes.items()}
