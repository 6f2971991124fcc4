"""Read Megatron's own checkpoints: one ``model_optim_rng.pt`` for each model-parallel rank."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.errors import RejectedError
from mds_ckpt.megatron.assemble import Assembly, Fragment, TorchSource
from mds_ckpt.megatron.distributed_optimizer import FILE as DISTRIBUTED
from mds_ckpt.megatron.distributed_optimizer import distributed_parts, distributed_step
from mds_ckpt.megatron.indexed_state import (
    IndexedError,
    indexed_groups,
    indexed_parts,
    indexed_step,
)
from mds_ckpt.megatron.legacy_model import Degrees, ModelReading, args_of, known_name
from mds_ckpt.megatron.naming import BUFFERS, Named, flatten
from mds_ckpt.megatron.zero import FlatPart
from mds_ckpt.pickles.archive import TorchFile, open_torch_file
from mds_ckpt.pickles.records import TensorRef
from mds_ckpt.read_options import ReadOptions

__all__ = ["RankFolder", "list_ranks", "read_megatron"]

FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2,5})(?:_(\d{3,5}))?(?:_(\d{3,5}))?")
_CHUNK = re.compile(r"model(\d{0,4})")
_HEAD_COPY = "word_embeddings_for_head.weight"
MOST_ENTRIES = 100_000


@dataclass(frozen=True, order=True, slots=True)
class RankFolder:
    """One rank's folder. With one suffix it is the pipeline's or the experts', as args say."""

    tp: int
    second: int | None
    third: int | None
    path: Path


def list_ranks(folder: Path) -> list[RankFolder]:
    """The ranks' folders that hold a model file, in order of their numbers."""
    ranks = []
    with os.scandir(folder) as entries:
        for _, entry in zip(range(MOST_ENTRIES), entries, strict=False):
            match = _RANK.fullmatch(entry.name)
            if match is not None and entry.is_dir(follow_symlinks=False):
                numbers = [None if text is None else int(text) for text in match.groups()]
                path = folder / entry.name
                if (path / FILE).exists() or (path / FILE).is_symlink():
                    ranks.append(RankFolder(numbers[0] or 0, numbers[1], numbers[2], path))
    return sorted(ranks, key=lambda rank: (rank.tp, rank.second or 0, rank.third or 0))


@dataclass(frozen=True, slots=True)
class _Rank:
    tp: int
    pp: int
    file: TorchFile
    chunks: tuple[Mapping[str, TensorRef], ...]
    """The parameters of each virtual pipeline chunk, in the order of the model."""


def read_megatron(folder: Path, options: ReadOptions) -> Checkpoint:
    """Open the checkpoint in ``folder``. Reads the files' pickles and no tensor data.

    Raises:
        RejectedError: A file is missing, damaged or hostile.
    """
    ranks = [_open_rank(rank) for rank in list_ranks(folder)]
    state: Mapping[str, Any] = ranks[0].file.value
    degrees = _degrees(folder, ranks, args_of(state) or {})
    names = [name for chunk in ranks[0].chunks for name in chunk]
    reading = ModelReading(folder, state, options, tp_size=degrees.tp, names=names)
    assembly = Assembly(folder, reading.facts, replicated=options.replicated)
    reader = _Reader(reading, degrees, _first_layers(folder, ranks, degrees))
    for rank in ranks:
        reader.add(assembly, rank)
        reading.keep_random(rank.tp, rank.pp, rank.file)
    step = None
    if optimizer := state.get("optimizer"):
        step = indexed_step(ranks[0].file, optimizer) or distributed_step(optimizer)
    return reading.checkpoint("megatron", assembly.states(), degrees, step=step)


def _open_rank(rank: RankFolder) -> _Rank:
    file = open_torch_file(rank.path / FILE)
    state = file.value
    if not isinstance(state, dict):
        raise RejectedError(file.path, "it holds no dictionary", remedy="copy the file again")
    keys = sorted(
        (key for key in state if isinstance(key, str) and _CHUNK.fullmatch(key)),
        key=lambda key: int(key.removeprefix("model") or 0),
    )
    chunks = []
    for key in keys:
        if not isinstance(state[key], Mapping):
            raise RejectedError(file.path, f"its '{key}' is no dictionary", remedy="copy it again")
        chunks.append(
            {
                name: tensor
                for name, tensor in flatten(state[key])
                if isinstance(tensor, TensorRef) and not name.endswith(BUFFERS)
            }
        )
    if not chunks:
        raise RejectedError(file.path, "it holds no model", remedy="copy the file again")
    pp = rank.second or 0 if _has_pipeline(state, rank) else 0
    return _Rank(rank.tp, pp, file, tuple(chunks))


def _has_pipeline(state: Mapping[str, Any], rank: RankFolder) -> bool:
    if rank.third is not None:
        return True
    args = args_of(state) or {}
    is_pipeline = args.get("pipeline_model_parallel_size") not in (None, 1)
    return is_pipeline or args.get("expert_model_parallel_size") in (None, 1)


def _degrees(folder: Path, ranks: list[_Rank], args: Mapping[str, Any]) -> Degrees:
    def size(key: str, found: int) -> int:
        stored = args.get(key)
        return max(stored, found) if type(stored) is int and stored < 1 << 16 else found

    tp = size("tensor_model_parallel_size", max(rank.tp for rank in ranks) + 1)
    pp = size("pipeline_model_parallel_size", max(rank.pp for rank in ranks) + 1)
    found = [(rank.tp, rank.pp) for rank in ranks]
    if len(set(found)) != len(found):
        raise RejectedError(
            folder,
            "several folders are the same rank's; expert parallel checkpoints are not read",
            remedy="remove the folders that do not belong here",
        )
    missing = sorted({(t, p) for p in range(pp) for t in range(tp)} - set(found))
    if missing:
        listed = ", ".join(_folder_name(t, p, pp) for t, p in missing[:8])
        raise RejectedError(
            folder,
            f"{tp * pp} ranks expected (tp {tp}, pp {pp}), {len(found)} found; {listed} missing",
            remedy="copy the folders that are missing",
        )
    dp = args.get("data_parallel_size")
    vp = len(ranks[0].chunks)
    return Degrees(tp=tp, pp=pp, dp=dp if type(dp) is int and dp > 0 else None, vp=vp)


def _folder_name(tp: int, pp: int, pp_size: int) -> str:
    return f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if pp_size > 1 else "")


_LAYER = re.compile(r"(?:language_model\.)?(?:encoder|decoder|transformer)\.layers\.(\d+)\.")


def _num_layers(chunk: Mapping[str, TensorRef]) -> int:
    numbers = [int(match[1]) for name in chunk if (match := _LAYER.match(name)) is not None]
    return max(numbers, default=-1) + 1


def _first_layers(folder: Path, ranks: list[_Rank], degrees: Degrees) -> dict[tuple[int, int], int]:
    """The number of the first layer of each stage's chunk; files count from 0 in each."""
    stages = {rank.pp: rank for rank in ranks if rank.tp == 0}
    chunks = {len(rank.chunks) for rank in ranks}
    if len(chunks) != 1:
        raise RejectedError(
            folder, "its ranks have different numbers of model chunks", remedy="copy it again"
        )
    first, total = {}, 0
    for chunk in range(chunks.pop()):
        for stage in range(degrees.pp):
            first[stage, chunk] = total
            total += _num_layers(stages[stage].chunks[chunk])
    return first


class _Reader:
    def __init__(
        self, reading: ModelReading, degrees: Degrees, first: Mapping[tuple[int, int], int]
    ) -> None:
        self._reading = reading
        self._degrees = degrees
        self._first = first
        if reading.family == "t5" and degrees.pp > 1:
            raise RejectedError(
                reading.path,
                "it is a T5 model in a pipeline, whose stages we can't tell apart",
                remedy="merge it to one stage with the code that wrote it",
            )

    def add(self, assembly: Assembly, rank: _Rank) -> None:
        for name, chunk, tensor in self._parameters(rank):
            named = self._named(rank, name, chunk)
            source = TorchSource(rank.file, tensor)
            copy = _copy(name)
            assembly.add(
                named, "weight", _fragment(rank.tp, tensor.shape, tensor.dtype, source, copy)
            )
        self._add_optimizer(assembly, rank)

    def _parameters(self, rank: _Rank) -> Iterator[tuple[str, int, TensorRef]]:
        for number, chunk in enumerate(rank.chunks):
            for name, tensor in chunk.items():
                yield name, number, tensor

    def _named(self, rank: _Rank, name: str, chunk: int) -> Named:
        if name == _HEAD_COPY:
            return Named("embedding.word_embeddings.weight", "vocab")
        first = self._first[rank.pp, chunk]
        named = self._reading.canonical(name, first_layer=first)
        return known_name(rank.file.path, named, name)

    def _add_optimizer(self, assembly: Assembly, rank: _Rank) -> None:
        optimizer = rank.file.value.get("optimizer")
        if not optimizer:
            return
        try:
            parts = list(self._optimizer_parts(rank, optimizer))
        except IndexedError as error:
            self._reading.note(f"{rank.file.path.parent.name}: {error}; moments are not read")
            return
        self._reading.keep_groups(indexed_groups(optimizer), None, [])
        for chunk, part, shape in parts:
            named = self._named(rank, part.name, chunk)
            fragment = _fragment(rank.tp, shape, part.dtype, part.source, _copy(part.name))
            assembly.add(named, part.state, fragment)

    def _optimizer_parts(
        self, rank: _Rank, optimizer: Any
    ) -> Iterator[tuple[int, FlatPart, tuple[int, ...]]]:
        """What the rank's own file holds, or that of the distributed optimizer beside it."""
        shared = rank.file.path.with_name(DISTRIBUTED)
        if shared.exists() or shared.is_symlink():
            yield from distributed_parts(shared, rank.file, rank.chunks)
            return
        parameters = {f"{chunk}:{name}": t for name, chunk, t in self._parameters(rank)}
        for part, shape in indexed_parts(rank.file, optimizer, parameters):
            number, _, name = part.name.partition(":")
            yield int(number), replace(part, name=name), shape


def _copy(name: str) -> int:
    """The last stage keeps a copy of a tied embedding, which must be equal."""
    return 1 if name == _HEAD_COPY else 0


def _fragment(
    tp_rank: int, shape: tuple[int, ...], dtype: str, source: TorchSource, copy: int
) -> Fragment:
    count = 1
    for extent in shape:
        count *= extent
    return Fragment(
        tp_rank=tp_rank,
        local_shape=shape,
        start=0,
        stop=count,
        dtype=dtype,
        source=source,
        copy=copy,
    )
