"""A lone safetensors file: tensors under the names that they have, without a model around them."""

from __future__ import annotations

from pathlib import Path

from mds_ckpt.checkpoint import Checkpoint, PiecedTensor, StoredPiece
from mds_ckpt.files.safetensors_file import SafetensorsFile, StoredTensor
from mds_ckpt.formats import Format, refuse_read_options
from mds_ckpt.manifest import ModelRecord
from mds_ckpt.read_options import ReadOptions
from mds_ckpt.tensors.box import whole


def detect(path: Path) -> bool:
    """Whether it is a file of that suffix, or one that begins with a header's length and ``{``."""
    if not path.is_file():
        return False
    if path.suffix == ".safetensors":
        return True
    with path.open("rb") as file:
        head = file.read(9)
    return len(head) == 9 and head[8:] == b"{" and head[5:8] == b"\0\0\0"


def open_file(path: Path, options: ReadOptions | None = None) -> Checkpoint:
    """Open the file; its header is checked, no tensor is read."""
    refuse_read_options(options, "safetensors")
    file = SafetensorsFile(path, cache_links=True)
    tensors = {}
    for name, entry in file.header.entries.items():
        source = StoredTensor(file, name, dtype=entry.dtype, shape=entry.shape)
        pieces = [StoredPiece(whole(entry.shape), None, source)]
        tensors[name] = PiecedTensor(name, entry.shape, entry.dtype, pieces=pieces)
    return Checkpoint(
        path=path,
        format="safetensors",
        model=ModelRecord(family="unknown", config={}, vocab_size=0, tied_embeddings=False),
        states={"weight": tensors},
        notes=("a file without a model: names are its own, not canonical",),
    )


FORMAT = Format(name="safetensors", title="safetensors file", detect=detect, open=open_file)
