"""Weights as Megatron-core's ``torch_dist`` checkpoint, which torch's own DCP reads too.

Data files are torch files one behind the other, with ``.metadata`` to say what is where; it is
written last but for the digests. What is stored under which name, ``core_tensors`` says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.files.file_operations import FileOperations, write_file
from mds_ckpt.megatron.core_args import check_core, core_args
from mds_ckpt.megatron.core_tensors import CoreTensors, StoredTensor
from mds_ckpt.megatron.target_args import Progress
from mds_ckpt.megatron.target_layout import (
    TargetLayout,
    padded_vocabulary,
    true_vocabulary,
)
from mds_ckpt.megatron.target_ranks import merged_losses
from mds_ckpt.pickles.records import EnumRecord, Global, Opaque, TorchDtype
from mds_ckpt.pickles.torch_writer import ordered, pickled, size, write_torch
from mds_ckpt.plan import Loss, Options, Plan

__all__ = ["plan"]

FILE_BYTES = 4_000_000_000
"""A data file is full at this size."""
_MARKER: Mapping[str, Any] = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_DCP = "torch.distributed.checkpoint.metadata"
_WORDS = "embedding.word_embeddings.weight"
_TORCH_NAMES: Mapping[str, str] = MappingProxyType(
    {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
)


def plan(checkpoint: Checkpoint, options: Options) -> Plan:
    """What writing ``checkpoint`` for Megatron-core takes. Reads no tensor data.

    Args:
        checkpoint: Any opened checkpoint of a GPT or BERT.
        options: Type, vocabulary and its padding.

    Raises:
        UnsupportedError: Megatron-core's form is not known for the model.
    """
    return _Writer(checkpoint, options).plan()


class _Writer:
    def __init__(self, checkpoint: Checkpoint, options: Options) -> None:
        check_core(checkpoint)
        self._checkpoint = checkpoint
        self._options = options
        self._losses: list[Loss] = []
        self._words = true_vocabulary(checkpoint, options.vocab_size)
        layout = TargetLayout(divisible_by=options.divisible_by)
        self._rows = padded_vocabulary(checkpoint, layout, self._words)
        self._progress = Progress(checkpoint)

    def plan(self) -> Plan:
        stored = CoreTensors(
            self._checkpoint,
            dtype=self._options.dtype,
            words=self._words,
            rows=self._rows,
            losses=self._losses,
        )
        tensors = list(stored.tensors())
        states = self._checkpoint.states
        reason = "only weights are written"
        return Plan(
            used=[("weight", name) for name in self._checkpoint.tensors],
            dropped={(s, n): reason for s in states if s != "weight" for n in states[s]},
            num_targets=len(tensors),
            nbytes=sum(chunk.nbytes for t in tensors for chunk in t.chunks) + (len(tensors) << 13),
            write=lambda folder, operations: self._write(
                folder, tensors, stored.objects(), operations
            ),
            notes=self._notes(),
        )

    def _notes(self) -> list[str]:
        notes = ["weights only; load with --finetune, or --no-load-optim and --no-load-rng"]
        if self._rows != self._words:
            notes.append(f"{self._words} words are padded to {self._rows} rows with zeros")
        return notes

    def _write(
        self,
        folder: Path,
        tensors: Sequence[StoredTensor],
        objects: Sequence[str],
        operations: FileOperations,
    ) -> Sequence[Loss]:
        self._losses.clear()
        is_release, iteration = self._options.is_release, self._progress.iteration
        step = folder / ("release" if is_release else f"iter_{iteration:07d}")
        operations.make_folder(step)
        data = _DataFiles(step, operations)
        for tensor in tensors:
            for offset, chunk in tensor.placed():
                data.add(tensor.name, size(offset), chunk)
        for name in objects:
            data.add(name, None, [None])
        digests = data.close()
        small = {
            "common.pt": _common_file(self._common(_dtype_of(tensors))),
            "metadata.json": json.dumps(_MARKER).encode(),
            ".metadata": pickled(_metadata(tensors, objects, data.places)),
        }
        for name, content in small.items():
            write_file(step / name, content, operations=operations)
            digests[name] = hashlib.sha256(content).hexdigest()
        integrity = json.dumps({"algorithm": "sha256", "files": digests}, indent=1)
        write_file(step / "integrity.json", integrity.encode(), operations=operations)
        operations.sync_folder(step)
        tracker = "release" if is_release else str(iteration)
        name = "latest_checkpointed_iteration.txt"
        write_file(folder / name, tracker.encode(), operations=operations)
        return merged_losses(self._losses)

    def _common(self, dtype: str) -> dict[str, Any]:
        return {
            "args": core_args(
                self._checkpoint, dtype=dtype, words=self._words, padded_rows=self._rows
            ),
            "checkpoint_version": 3.0,
            "iteration": self._progress.iteration,
            "num_floating_point_operations_so_far": 0,
        }


def _dtype_of(tensors: Sequence[StoredTensor]) -> str:
    return next(tensor.chunks[0].name for tensor in tensors if tensor.name == _WORDS)


class _Buffer:
    """Collects bytes."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes | memoryview) -> None:
        self.data += data


def _common_file(value: Mapping[str, Any]) -> bytes:
    buffer = _Buffer()
    write_torch(buffer, dict(value))
    return bytes(buffer.data)


class _DataFiles:
    """Data files in the making: records one behind the other, with where each of them is."""

    def __init__(self, folder: Path, operations: FileOperations) -> None:
        self._folder = folder
        self._operations = operations
        self._stream: BinaryIO | None = None
        self._name = ""
        self._at = 0
        self._hash = hashlib.sha256()
        self._digests: dict[str, str] = {}
        self.places: list[tuple[Opaque, Opaque]] = []

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes to the open file; for the writer of a record."""
        assert self._stream is not None
        self._operations.write(self._stream, memoryview(data))
        self._hash.update(data)
        self._at += len(data)

    def add(self, name: str, offset: Opaque | None, value: Any) -> None:
        """Append a record of a chunk, or of an object if ``offset`` is None."""
        if self._stream is None or self._at >= FILE_BYTES:
            self._end()
            self._name = f"__0_{len(self._digests)}.distcp"
            self._stream = self._operations.create(self._folder / self._name)
        start = self._at
        write_torch(self, value)
        index = {"fqn": name, "offset": offset, "index": None}
        place = {
            "relative_path": self._name,
            "offset": start,
            "length": self._at - start,
            "transform_descriptors": None,
        }
        info = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
        key = Opaque(Global(_DCP, "MetadataIndex"), state=index)
        self.places.append((key, Opaque(info, state=place)))

    def _end(self) -> None:
        if self._stream is not None:
            self._operations.sync(self._stream)
            self._stream.close()
            self._digests[self._name] = self._hash.hexdigest()
            self._stream, self._at, self._hash = None, 0, hashlib.sha256()

    def close(self) -> dict[str, str]:
        """Close the last file; returns the files' digests."""
        self._end()
        return self._digests


def _metadata(
    tensors: Sequence[StoredTensor], objects: Sequence[str], places: Sequence[tuple[Opaque, Opaque]]
) -> Opaque:
    """Torch's ``Metadata``, as its own classes pickle themselves."""
    described: dict[str, Any] = {tensor.name: _described(tensor) for tensor in tensors}
    described |= {name: Opaque(Global(_DCP, "BytesStorageMetadata")) for name in objects}
    storage = ordered({})
    storage.items = list(places)
    state = {
        "state_dict_metadata": described,
        "planner_data": {name: (name,) for name in described},
        "storage_data": storage,
        "storage_meta": None,
        "version": "1.0.0",
    }
    return Opaque(Global(_DCP, "Metadata"), state=state)


def _described(tensor: StoredTensor) -> Opaque:
    layout = Opaque(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    memory = EnumRecord(Global(_DCP, "_MEM_FORMAT_ENCODING"), 0)
    dtype = TorchDtype(_TORCH_NAMES[tensor.chunks[0].name])
    properties = Opaque(
        Global(_DCP, "TensorProperties"), state=(dtype, layout, False, memory, False)
    )
    chunks = []
    for offset, chunk in tensor.placed():
        place = {"offsets": size(offset), "sizes": size(chunk.shape)}
        chunks.append(Opaque(Global(_DCP, "ChunkStorageMetadata"), state=place))
    state = {"properties": properties, "size": size(tensor.shape), "chunks": chunks}
    return Opaque(Global(_DCP, "TensorStorageMetadata"), state=state)
