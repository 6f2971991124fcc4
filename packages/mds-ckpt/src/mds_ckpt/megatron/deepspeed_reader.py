"""Read a DeepSpeed checkpoint folder into canonical tensors: weights, masters, Adam's moments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from mds_ckpt.checkpoint import Checkpoint, LazyTensor
from mds_ckpt.errors import RejectedError
from mds_ckpt.megatron.assemble import (
    Assembly,
    CastTensor,
    Fragment,
    TorchSource,
    model_order,
)
from mds_ckpt.megatron.deepspeed_folder import Listing, list_folder
from mds_ckpt.megatron.deepspeed_optimizer import OptimizerFiles
from mds_ckpt.megatron.legacy_model import ModelReading, known_name, read_degrees
from mds_ckpt.megatron.naming import BUFFERS, Named, flatten
from mds_ckpt.megatron.pipeline_names import PipelineNames, numbered_keys
from mds_ckpt.megatron.zero import is_expert, shapes_of
from mds_ckpt.pickles.archive import TorchFile
from mds_ckpt.pickles.records import TensorRef
from mds_ckpt.pickles.torch_files import TorchFiles, state_of
from mds_ckpt.read_options import ReadOptions

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
        self._files = TorchFiles()
        self._first_owners: dict[tuple[int, int], tuple[int, Path]] = {}
        self._owners: dict[Path, tuple[int, Path]] = {}
        main = {**listing.stage_3_models, **listing.models} or listing.layers
        self._head = self._files.open(min(main.items())[1])
        self._degrees = read_degrees(listing, state_of(self._head))
        self._names = PipelineNames(self._module_layers() | self._file_layers())
        self._check_blocks()

    def read(self) -> Checkpoint:
        has_fpdt = any("qkv_linear_weight" in name for name in self._first_names())
        reading = ModelReading(
            self._folder,
            state_of(self._head),
            self._options,
            tp_size=self._degrees.tp,
            names=list(self._first_names()),
            has_fpdt_names=has_fpdt,
        )
        self._reading = reading
        assembly = Assembly(self._folder, reading.facts, replicated=self._options.replicated)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._add_weights(assembly)
        optimizer = OptimizerFiles(
            self._listing, self._files, reading, self._degrees, self._names, self._shapes
        )
        stage = optimizer.add_to(assembly)
        states = assembly.states()
        optimizer.name_what_is_missing(states, assembly.incomplete)
        if not states.get("weight") or self._listing.stage_3_models:
            states = self._weights_from_masters(states)
        if reading.family == "unknown":
            states = self._with_aliases(states)
        step = optimizer.step()
        self._keep_random()
        return reading.checkpoint("deepspeed", states, self._degrees, zero_stage=stage, step=step)

    def _keep_random(self) -> None:
        """Of stage 3, where every data-parallel rank has a file, the first rank's state."""
        for rank, path in self._first_models().items():
            place, tp_rank = divmod(rank, self._degrees.tp)
            self._reading.keep_random(tp_rank, place, self._files.open(path))

    # Names

    def _file_layers(self) -> dict[int, list[str]]:
        """Keys of the layers with files of their own."""
        first = min((tp for _, tp in self._listing.layers), default=0)
        # Rank by rank, so a file that only one rank lacks is named as such when weights are read.
        return {
            layer: list(self._files.open(path).value)
            for (layer, tp), path in sorted(self._listing.layers.items())
            if tp == first
        }

    def _module_layers(self) -> dict[int, list[str]]:
        """Keys of the layers that the model files number, stage by stage; most number none."""
        keys: dict[int, list[str]] = {}
        for rank, path in sorted(self._first_models().items()):
            if rank % self._degrees.tp == 0:
                module = self._files.open(path).value.get("module")
                names = (name for name, _ in flatten(module)) if isinstance(module, Mapping) else ()
                for number, found in numbered_keys(names).items():
                    keys.setdefault(number, []).extend(found)
        return keys

    def _first_models(self) -> dict[int, Path]:
        """Model files by rank; of stage 3, where each data-parallel rank has one, the first's."""
        models = {rank: p for (dp, rank), p in self._listing.stage_3_models.items() if dp == 0}
        return models | {rank: path for (rank,), path in self._listing.models.items()}

    def _check_blocks(self) -> None:
        """Blocks are numbered by their order, so a hole would shift all that follow it."""
        missing = self._names.missing_blocks()
        if missing and any(layer in missing for layer, _ in self._listing.layers):
            raise RejectedError(
                self._folder,
                f"layer {missing[0]} is no transformer block, and those around it are",
                remedy="files of two saves may lie in one folder; move the older ones elsewhere",
            )
        if missing:
            raise RejectedError(
                self._folder,
                f"layer {missing[0]} has no files ({len(missing)} missing between its neighbours)",
                remedy=f"copy layer_{missing[0]:02d}-model_*-model_states.pt here"
                if self._listing.layers
                else "copy the model files of all ranks here",
            )

    def _first_names(self) -> Iterator[str]:
        if self._names:
            yield from self._names.flat_names()
            return
        module = state_of(self._head).get("module")
        for name, _ in flatten(module) if isinstance(module, Mapping) else ():
            yield name
        for group in shapes_of(state_of(self._head).get("param_shapes")) or ():
            yield from group

    def _resolve(self, name: str) -> Named | None:
        if self._names:
            return self._names.canonical(name)
        return self._reading.canonical(name)

    # Weights

    def _add_weights(self, assembly: Assembly) -> None:
        if self._listing.layers:
            self._add_layer_files(assembly)
        if self._listing.models:
            self._add_modules(assembly)
        self._add_frozen(assembly)
        self._add_buffers(assembly)
        self._add_experts(assembly)

    def _is_buffer(self, key: str) -> bool:
        """Whether a tensor is none of the model's parameters; of models that we know only."""
        return self._reading.family != "unknown" and key.endswith(BUFFERS)

    def _add_buffers(self, assembly: Assembly) -> None:
        """Buffers of an unknown model, which stage 3 leaves whole beside emptied parameters."""
        if self._reading.family != "unknown":
            return
        for (dp, rank), path in sorted(self._listing.stage_3_models.items()):
            file = self._files.open(path)
            module, names = file.value.get("module"), file.value.get("buffer_names")
            if dp or not isinstance(module, Mapping) or not isinstance(names, list):
                continue
            for key, tensor in flatten(module):
                if isinstance(tensor, TensorRef) and key in names:
                    named = known_name(path, self._resolve(key), key)
                    self._add_weight(assembly, named, file, tensor, rank % self._degrees.tp)

    def _add_frozen(self, assembly: Assembly) -> None:
        """Parameters that are not trained, which stage 3 shares out in the model files."""
        for (dp, rank), path in sorted(self._listing.stage_3_models.items()):
            file = self._files.open(path)
            shapes = shapes_of(file.value.get("frozen_param_shapes"))
            shares = file.value.get("frozen_param_fragments")
            for name, shape in (shapes[0] if shapes else {}).items():
                tensor = shares.get(name) if isinstance(shares, Mapping) else None
                if not isinstance(tensor, TensorRef):
                    raise RejectedError(
                        path, "its share is missing", remedy="copy the file again", tensor=name
                    )
                named = self._reading.shared(known_name(path, self._resolve(name), name))
                count = math.prod(shape)
                start = min(dp * tensor.numel, count)
                fragment = Fragment(
                    tp_rank=rank % self._degrees.tp,
                    local_shape=shape,
                    start=start,
                    stop=min(start + tensor.numel, count),
                    dtype=tensor.dtype,
                    source=TorchSource(file, tensor),
                )
                assembly.add(named, "weight", fragment)

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
                file = self._files.open(path)
                for key, tensor in flatten(file.value):
                    # Experts have files of their own; a layer's file has one rank's, if any.
                    is_double = bool(self._listing.experts) and is_expert(key)
                    is_left_out = is_double or self._is_buffer(key)
                    if isinstance(tensor, TensorRef) and not is_left_out:
                        named = known_name(path, self._names.of_file(layer, key), key)
                        self._refuse_double(path, tp, named)
                        self._add_weight(assembly, named, file, tensor, tp)

    def _add_modules(self, assembly: Assembly) -> None:
        for rank in range(self._degrees.tp * self._degrees.pp):
            path = self._listing.models.get((rank,))
            if path is None and self._listing.layers:
                continue
            if path is None:
                raise RejectedError(
                    self._folder,
                    f"model-parallel rank {rank} has no file "
                    f"({self._degrees.tp * self._degrees.pp} expected)",
                    remedy=f"copy mp_rank_{rank:02d}_model_states.pt here",
                )
            file = self._files.open(path)
            module = file.value.get("module")
            if module is None and self._listing.layers:
                continue  # this stage's layers have files of their own
            if not isinstance(module, Mapping):
                raise RejectedError(
                    path, "its module is not a dictionary", remedy="copy the layer_* files too"
                )
            stage, tp_rank = divmod(rank, self._degrees.tp)
            for key, tensor in flatten(module):
                # DeepSpeed's MoE saves a second copy of local experts under a broken prefix.
                if not isinstance(tensor, TensorRef) or key.startswith("encoderlayers."):
                    continue
                if self._is_buffer(key) or (stage and self._names.is_dead_copy(key)):
                    continue
                named = known_name(path, self._resolve(key), key)
                self._refuse_double(path, tp_rank, named)
                copy = stage if self._names.is_tied(key) else 0
                self._add_weight(assembly, named, file, tensor, tp_rank, copy=copy)

    def _refuse_double(self, path: Path, tp_rank: int, named: Named) -> None:
        """RejectedError if one file stands for two ranks, which hold different parts."""
        if path not in self._owners:
            status = path.stat()
            identity = status.st_dev, status.st_ino
            self._owners[path] = self._first_owners.setdefault(identity, (tp_rank, path))
        owner, first = self._owners[path]
        if owner != tp_rank and self._reading.shared(named).sharing != "replicated":
            raise RejectedError(
                path,
                f"it is the very file that stands for tensor-parallel rank {owner} ({first.name})",
                remedy=f"copy the file of rank {tp_rank} here",
                tensor=named.name,
            )

    def _add_experts(self, assembly: Assembly) -> None:
        for (_, _, rank), path in sorted(self._listing.experts.items()):
            file = self._files.open(path)
            for key, tensor in flatten(file.value):
                if isinstance(tensor, TensorRef):
                    named = known_name(path, self._resolve(key), key)
                    self._add_weight(assembly, named, file, tensor, rank % self._degrees.tp)

    def _add_weight(
        self,
        assembly: Assembly,
        named: Named,
        file: TorchFile,
        tensor: TensorRef,
        tp_rank: int,
        *,
        copy: int = 0,
    ) -> None:
        named = self._reading.shared(named)
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
            copy=copy,
        )
        assembly.add(named, "weight", fragment)

    def _with_aliases(
        self, states: Mapping[str, Mapping[str, LazyTensor]]
    ) -> dict[str, dict[str, LazyTensor]]:
        """With the parameters that the model has under two names, and the optimizer under one."""
        shared = state_of(self._head).get("shared_params")
        found = {state: dict(tensors) for state, tensors in states.items()}
        for alias, name in shared.items() if isinstance(shared, Mapping) else ():
            for tensors in found.values():
                if isinstance(alias, str) and isinstance(name, str) and name in tensors:
                    tensors.setdefault(alias, tensors[name])
        return found

    def _weights_from_masters(
        self, states: Mapping[str, Mapping[str, LazyTensor]]
    ) -> dict[str, dict[str, LazyTensor]]:
        """Stage 3 keeps masters only; the run's weights are these, rounded to its number type.

        Weights that are there already are those of frozen parameters.
        """
        masters, frozen = dict(states.get("master", {})), dict(states.get("weight", {}))
        if not masters:
            raise RejectedError(
                self._folder,
                "it holds no weights and no optimizer files to take them from",
                remedy="copy the zero_pp_rank_*_optim_states.pt files here",
            )
        dtype = self._reading.dtype
        rest = {state: dict(found) for state, found in states.items() if state != "weight"}
        made: dict[str, LazyTensor] = masters
        if dtype == "F32":
            rest.pop("master")
        else:
            made = {name: CastTensor(tensor, dtype) for name, tensor in masters.items()}
        weights = made | frozen
        ordered = {name: weights[name] for name in sorted(weights, key=model_order)}
        return {"weight": ordered, **rest}
