"""Read a DeepSpeed checkpoint folder into canonical tensors: weights, masters, Adam's moments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mds_ckpt.archive import TorchFile, open_torch_file
from mds_ckpt.assemble import Assembly, CastTensor, Fragment, MissingTensor, TorchSource
from mds_ckpt.checkpoint import Checkpoint, LazyTensor
from mds_ckpt.deepspeed_folder import Listing, list_folder
from mds_ckpt.errors import RejectedError
from mds_ckpt.indexed_state import IndexedError, indexed_parts
from mds_ckpt.legacy_model import ModelReading, read_degrees
from mds_ckpt.naming import Named, flatten
from mds_ckpt.pipeline_names import PipelineNames
from mds_ckpt.read_options import ReadOptions
from mds_ckpt.records import TensorRef
from mds_ckpt.zero import (
    FlatPart,
    ZeroError,
    is_stage_3,
    optimizer_state,
    optimizer_step,
    shapes_of,
    split_parts,
    stage_3_parts,
    stage_of,
)

__all__ = ["read_deepspeed"]


def read_deepspeed(folder: Path, options: ReadOptions) -> Checkpoint:
    """Open the checkpoint in ``folder``. Reads the files' pickles and no tensor data.

    Raises:
        RejectedError: A file that is needed is missing, damaged or hostile.
    """
    return _Reader(list_folder(folder), options).read()


class _Reader:
    def __init__(self, listing: Listing, options: ReadOptions) -> None:
        self._listing = listing
        self._options = options
        self._folder = listing.folder
        self._files: dict[Path, TorchFile] = {}
        main = {**listing.stage_3_models, **listing.models} or listing.layers
        self._head = self._open(min(main.items())[1])
        self._degrees = read_degrees(listing, _mapping(self._head))
        self._names = self._pipeline_names() if listing.layers else PipelineNames({})
        self._check_blocks()

    def read(self) -> Checkpoint:
        has_fpdt = any("qkv_linear_weight" in name for name in self._first_names())
        reading = ModelReading(
            self._folder,
            _mapping(self._head),
            self._options,
            tp_size=self._degrees.tp,
            names=list(self._first_names()),
            has_fpdt_names=has_fpdt,
        )
        self._reading = reading
        assembly = Assembly(self._folder, reading.facts, replicated=self._options.replicated)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._add_weights(assembly)
        stage = self._add_optimizer(assembly)
        states = assembly.states()
        self._name_what_is_missing(states, assembly.incomplete)
        if not states.get("weight"):
            states = self._weights_from_masters(states)
        return reading.checkpoint(
            "deepspeed", states, self._degrees, zero_stage=stage, step=self._optimizer_step()
        )

    def _open(self, path: Path) -> TorchFile:
        if path not in self._files:
            file = open_torch_file(path)
            if not isinstance(file.value, dict):
                raise RejectedError(
                    path, "it does not hold a dictionary", remedy="copy the file again"
                )
            self._files[path] = file
        return self._files[path]

    # Names

    def _pipeline_names(self) -> PipelineNames:
        first = min(tp for _, tp in self._listing.layers)
        # Rank by rank, so a file that only one rank lacks is named as such when weights are read.
        return PipelineNames(
            {
                layer: list(self._open(path).value)
                for (layer, tp), path in sorted(self._listing.layers.items())
                if tp == first
            }
        )

    def _check_blocks(self) -> None:
        """Blocks are numbered by their order, so a hole would shift all that follow it."""
        missing = self._names.missing_blocks()
        if missing:
            raise RejectedError(
                self._folder,
                f"layer {missing[0]} has no files ({len(missing)} missing between its neighbours)",
                remedy=f"copy layer_{missing[0]:02d}-model_*-model_states.pt here",
            )

    def _first_names(self) -> Iterator[str]:
        if self._listing.layers:
            yield from self._names.flat_names()
            return
        module = _mapping(self._head).get("module")
        for name, _ in flatten(module) if isinstance(module, Mapping) else ():
            yield name
        for group in shapes_of(_mapping(self._head).get("param_shapes")) or ():
            yield from group

    def _resolve(self, name: str) -> Named | None:
        if self._listing.layers:
            return self._names.canonical(name)
        return self._reading.canonical(name)

    # Weights

    def _add_weights(self, assembly: Assembly) -> None:
        if self._listing.layers:
            self._add_layer_files(assembly)
        elif self._listing.models:
            self._add_modules(assembly)
        self._add_experts(assembly)

    def _add_layer_files(self, assembly: Assembly) -> None:
        layers = sorted({layer for layer, _ in self._listing.layers})
        for layer in layers:
            for tp in range(self._degrees.tp):
                path = self._listing.layers.get((layer, tp))
                if path is None:
                    raise RejectedError(
                        self._folder,
                        f"layer {layer} has no file of tensor-parallel rank {tp} "
                        f"({self._degrees.tp} expected)",
                        remedy=f"copy layer_{layer:02d}-model_{tp:02d}-model_states.pt here",
                    )
                file = self._open(path)
                for key, tensor in flatten(file.value):
                    if isinstance(tensor, TensorRef):
                        named = self._named(path, self._names.of_file(layer, key), key)
                        self._add_weight(assembly, named, file, tensor, tp)

    def _add_modules(self, assembly: Assembly) -> None:
        for rank in range(self._degrees.tp * self._degrees.pp):
            path = self._listing.models.get((rank,))
            if path is None:
                raise RejectedError(
                    self._folder,
                    f"model-parallel rank {rank} has no file "
                    f"({self._degrees.tp * self._degrees.pp} expected)",
                    remedy=f"copy mp_rank_{rank:02d}_model_states.pt here",
                )
            file = self._open(path)
            module = file.value.get("module")
            if not isinstance(module, Mapping):
                raise RejectedError(
                    path, "its module is not a dictionary", remedy="copy the layer_* files too"
                )
            for key, tensor in flatten(module):
                # DeepSpeed's MoE saves a second copy of local experts under a broken prefix.
                if isinstance(tensor, TensorRef) and not key.startswith("encoderlayers."):
                    named = self._named(path, self._reading.canonical(key), key)
                    self._add_weight(assembly, named, file, tensor, rank % self._degrees.tp)

    def _add_experts(self, assembly: Assembly) -> None:
        for (_, _, rank), path in sorted(self._listing.experts.items()):
            file = self._open(path)
            for key, tensor in flatten(file.value):
                if isinstance(tensor, TensorRef):
                    named = self._named(path, self._resolve(key), key)
                    self._add_weight(assembly, named, file, tensor, rank % self._degrees.tp)

    def _named(self, path: Path, named: Named | None, key: str) -> Named:
        if named is None:
            raise RejectedError(
                path,
                "its name is not one that Megatron writes",
                remedy="tell us which code wrote it",
                tensor=key,
            )
        return named

    def _add_weight(
        self, assembly: Assembly, named: Named, file: TorchFile, tensor: TensorRef, tp_rank: int
    ) -> None:
        if named.name in self._reading.dropped or (0 in tensor.shape and tensor.shape):
            return
        self._shapes[named.name] = tensor.shape
        fragment = Fragment(
            tp_rank=tp_rank,
            local_shape=tensor.shape,
            start=0,
            stop=tensor.numel,
            dtype=tensor.dtype,
            source=TorchSource(file, tensor),
        )
        assembly.add(named, "weight", fragment)

    def _weights_from_masters(
        self, states: Mapping[str, Mapping[str, LazyTensor]]
    ) -> dict[str, dict[str, LazyTensor]]:
        """Stage 3 keeps masters only; the run's weights are these, rounded to its number type."""
        masters = dict(states.get("master", {}))
        if not masters:
            raise RejectedError(
                self._folder,
                "it holds no weights and no optimizer files to take them from",
                remedy="copy the zero_pp_rank_*_optim_states.pt files here",
            )
        dtype = self._reading.dtype
        rest = {state: dict(found) for state, found in states.items() if state != "weight"}
        if dtype == "F32":
            rest.pop("master")
            return {"weight": masters, **rest}
        return {"weight": {n: CastTensor(t, dtype) for n, t in masters.items()}, **rest}

    # Optimizer

    def _name_what_is_missing(
        self, states: dict[str, dict[str, LazyTensor]], reason: str | None
    ) -> None:
        """Parameters that lie in missing shards only: they are there, and can't be read."""
        weights = states.get("weight", {})
        for state, found in states.items():
            absent = [n for n in weights if n not in found and ".local_experts." not in n]
            if state == "weight" or not absent:
                continue
            if reason is None:
                self._reading.note(f"{len(absent)} parameters have no {state} (they are frozen)")
                continue
            for name in absent:
                error = RejectedError(
                    self._folder,
                    reason,
                    remedy="copy the files that are missing, or convert with --weights-only",
                    tensor=f"{name} ({state})",
                )
                found[name] = MissingTensor(name, weights[name].shape, "F32", error=error)

    def _optimizer_step(self) -> int | None:
        for path in self._listing.optimizers.values():
            file = self._open(path)
            stored = optimizer_step(optimizer_state(file))
            return int(file.read(stored)) if isinstance(stored, TensorRef) else stored
        return self._reading.indexed_step(self._head)

    def _add_optimizer(self, assembly: Assembly) -> int:
        if not self._listing.optimizers:
            self._add_stage_0(assembly)
            return 0
        stage = 1
        for rank in range(self._degrees.tp * self._degrees.pp):
            files = self._optimizer_files(rank, assembly)
            if not files:
                continue
            try:
                states = [optimizer_state(file) for file in files]
                stage = stage_of(states[0])
                self._add_parts(assembly, rank, files, stage_3=is_stage_3(states[0]))
            except ZeroError as error:
                self._no_optimizer(files[0].path, str(error), stage)
        return stage

    def _no_optimizer(self, path: Path, reason: str, stage: int) -> None:
        if stage == 3:
            raise RejectedError(path, reason, remedy="copy the files again") from None
        self._reading.note(f"optimizer files: {reason}; masters and moments are not read")

    def _optimizer_files(self, rank: int, assembly: Assembly) -> list[TorchFile]:
        ranks = sorted(dp for dp, mp in self._listing.optimizers if mp == rank)
        files = [self._open(self._listing.optimizers[dp, rank]) for dp in ranks]
        expected = self._degrees.dp or len(ranks)
        if ranks != list(range(expected)):
            missing = sorted(set(range(expected)) - set(ranks))
            reason = (
                f"{expected} optimizer files of model-parallel rank {rank} expected, "
                f"{len(ranks)} found, data-parallel rank {missing[:8]} missing"
                if missing
                else f"{expected} optimizer files expected, {len(ranks)} found"
            )
            if self._is_stage_3(files):
                remedy = f"copy zero_pp_rank_{missing[0]}_mp_rank_{rank:02d}_optim_states.pt here"
                raise RejectedError(self._folder, reason, remedy=remedy)
            assembly.incomplete = reason
            self._reading.note(f"{reason}; masters and moments can't be read")
        return files

    def _is_stage_3(self, files: Sequence[TorchFile]) -> bool:
        return bool(self._listing.stage_3_models) or any(
            is_stage_3(optimizer_state(file)) for file in files
        )

    def _add_parts(
        self, assembly: Assembly, rank: int, files: Sequence[TorchFile], *, stage_3: bool
    ) -> None:
        shapes = self._param_shapes(rank)
        if not stage_3:
            parts = split_parts(files, shapes)
        elif shapes is None:
            raise ZeroError("the model file has no param_shapes")
        else:
            parts = stage_3_parts(files, shapes)
        local = {name: shape for group in shapes or () for name, shape in group.items()}
        for part in parts:
            self._add_part(assembly, rank, part, local.get(part.name))

    def _param_shapes(self, rank: int) -> Sequence[Mapping[str, tuple[int, ...]]] | None:
        path = self._listing.models.get((rank,)) or self._listing.stage_3_models.get((0, rank))
        return None if path is None else shapes_of(self._open(path).value.get("param_shapes"))

    def _add_part(
        self, assembly: Assembly, rank: int, part: FlatPart, shape: tuple[int, ...] | None
    ) -> None:
        stage = rank // self._degrees.tp
        named = self._resolve(part.name)
        if ".deepspeed_experts." in part.name:
            self._reading.note("masters and moments of experts are not read")
            return
        if named is None:
            named = self._named(part.source.file.path, None, part.name)
        if stage > 0 and self._names.is_dead_copy(part.name):
            return
        shape = shape or self._shapes.get(named.name)
        if shape is None:
            raise ZeroError(f"the shape of '{part.name}' is not stored")
        if part.stop > math.prod(shape):
            raise ZeroError(f"'{part.name}' has more elements than its shape {list(shape)}")
        fragment = Fragment(
            tp_rank=rank % self._degrees.tp,
            local_shape=shape,
            start=part.start,
            stop=part.stop,
            dtype=part.dtype,
            source=part.source,
            copy=stage if self._names.is_tied(part.name) else 0,
        )
        assembly.add(named, part.state, fragment)

    def _add_stage_0(self, assembly: Assembly) -> None:
        """Without ZeRO the optimizer's whole state is in the model files, by number."""
        if self._listing.layers or self._degrees.pp > 1:
            if any(
                self._open(path).value.get("optimizer") for path in self._listing.models.values()
            ):
                self._reading.note("optimizer state of a pipeline without ZeRO is not read")
            return
        for rank in range(self._degrees.tp):
            file = self._open(self._listing.models[rank,])
            module = file.value.get("module")
            if not file.value.get("optimizer") or not isinstance(module, Mapping):
                continue
            try:
                parts = list(indexed_parts(file, file.value["optimizer"], dict(flatten(module))))
            except IndexedError as error:
                self._reading.note(f"{file.path.name}: {error}; masters and moments are not read")
                return
            for part, shape in parts:
                self._add_part(assembly, rank, part, shape)


def _mapping(file: TorchFile) -> Mapping[str, Any]:
    value: Mapping[str, Any] = file.value
    return value
