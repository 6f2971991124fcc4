"""Read DeepSpeed's universal checkpoints: one folder a parameter, one file a state.

The tensors are whole over data-parallel ranks. Over tensor-parallel ranks they are concatenated, so
rows that each rank keeps in an order of its own still lie rank by rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mds_ckpt.checkpoint import Checkpoint, LazyTensor
from mds_ckpt.errors import RejectedError
from mds_ckpt.megatron.assemble import Assembly, CastTensor, Fragment, MissingTensor, TorchSource
from mds_ckpt.megatron.deepspeed_folder import list_folder
from mds_ckpt.megatron.legacy_model import ModelReading, known_name, read_degrees
from mds_ckpt.megatron.naming import Named
from mds_ckpt.megatron.pipeline_names import PipelineNames
from mds_ckpt.megatron.zero import shapes_of
from mds_ckpt.pickles.archive import TorchFile, open_torch_file
from mds_ckpt.pickles.records import TensorRef, as_subparam
from mds_ckpt.read_options import ReadOptions

__all__ = ["read_universal"]

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STATES: Mapping[str, str] = {"fp32": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
MOST_PARAMETERS = 200_000


@dataclass(frozen=True, slots=True)
class _Stored:
    """What one file holds: the tensor, its shape, and how it was put together."""

    tensor: TensorRef
    shape: tuple[int, ...]
    is_stacked: bool = False
    """Sub-parameters lie one after the other, each whole over all ranks."""
    is_flat: bool = False
    """Stage 3's form: no ranks were joined."""


def read_universal(folder: Path, options: ReadOptions) -> Checkpoint:
    """Open the universal checkpoint in ``folder``. Reads the files' pickles and no tensor data.

    Raises:
        RejectedError: A file is missing, damaged or hostile.
    """
    listing = list_folder(folder)
    models = listing.models or listing.stage_3_models
    if not models:
        raise RejectedError(
            folder,
            "it has no model file beside its zero folder",
            remedy="copy mp_rank_*_model_states.pt here",
        )
    head = open_torch_file(min(models.items())[1])
    state = head.value if isinstance(head.value, dict) else {}
    parameters = _parameters(folder / "zero")
    degrees = read_degrees(listing, state)
    reading = ModelReading(folder, state, options, tp_size=degrees.tp, names=list(parameters))
    reader = _Reader(reading, _shapes(state), parameters)
    assembly = Assembly(folder, reading.facts, replicated=options.replicated)
    for name, path in parameters.items():
        reader.add(assembly, name, path)
    states = _with_weights(reader.named_gaps(assembly.states()), reading)
    reader.keep_groups(folder / "zero" / "optimizer_state.pt")
    step = reader.step()
    return reading.checkpoint("universal", states, degrees, zero_stage=None, step=step)


def _parameters(folder: Path) -> dict[str, Path]:
    """The parameters' folders by the parameters' names."""
    found = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                found[entry.name] = folder / entry.name
            if len(found) > MOST_PARAMETERS:
                raise RejectedError(
                    folder,
                    f"it has more than {MOST_PARAMETERS} parameters",
                    remedy="this is no checkpoint that DeepSpeed wrote",
                )
    return dict(sorted(found.items()))


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    groups = shapes_of(state.get("param_shapes")) or ()
    return {name: shape for group in groups for name, shape in group.items()}


def _with_weights(
    states: dict[str, dict[str, LazyTensor]], reading: ModelReading
) -> dict[str, dict[str, LazyTensor]]:
    """The run's weights are the masters, rounded to its number type."""
    masters = states.get("master")
    if not masters:
        raise RejectedError(
            reading.path, "it holds no fp32.pt", remedy="copy the folder zero again"
        )
    if reading.dtype != "F32":
        return {"weight": {n: CastTensor(t, reading.dtype) for n, t in masters.items()}, **states}
    return {"weight": masters, **{s: found for s, found in states.items() if s != "master"}}


class _Reader:
    def __init__(
        self,
        reading: ModelReading,
        shapes: Mapping[str, tuple[int, ...]],
        parameters: Mapping[str, Path],
    ) -> None:
        self._reading = reading
        self._shapes = shapes
        self._parameters = parameters
        self._pipeline = _pipeline_names(parameters)
        self._lacking: dict[str, dict[str, Path]] = {}
        """Files that are not there, by state and canonical name."""

    def add(self, assembly: Assembly, name: str, folder: Path) -> None:
        named = known_name(folder, self._canonical(name), name)
        for word, state in _STATES.items():
            path = folder / f"{word}.pt"
            if not path.exists() and state != "master":
                self._lacking.setdefault(state, {})[named.name] = path
                continue
            file = open_torch_file(path)
            for fragment_name, fragment in self._fragments(named, file, name):
                assembly.add(fragment_name, state, fragment)

    def named_gaps(
        self, states: Mapping[str, Mapping[str, LazyTensor]]
    ) -> dict[str, dict[str, LazyTensor]]:
        """The states with tensors that say what is missing where a parameter has one moment."""
        complete = {state: dict(found) for state, found in states.items()}
        without = [set(paths) for paths in self._lacking.values()]
        frozen = set.intersection(*without) if len(without) == len(_MOMENTS) else set()
        if frozen:
            self._reading.note(f"{len(frozen)} parameters have no moments (they are frozen)")
        for state, paths in self._lacking.items():
            for name, path in paths.items():
                if name in frozen or state not in complete:
                    continue
                error = RejectedError(
                    path,
                    "it is missing, and the parameter's other moment is there",
                    remedy="copy it here, or convert with --weights-only",
                    tensor=f"{name} ({state})",
                )
                like = complete["master"][name]
                complete[state][name] = MissingTensor(name, like.shape, like.dtype, error=error)
        return complete

    def _canonical(self, name: str) -> Named | None:
        if self._pipeline is not None:
            return self._pipeline.canonical(name)
        return self._reading.canonical(name)

    def _fragments(
        self, named: Named, file: TorchFile, name: str
    ) -> Iterator[tuple[Named, Fragment]]:
        stored = self._stored(file, name)
        ranks = self._reading.facts.tp_size
        is_ranked = named.sharing in ("qkv", "gated", "query", "key_value") and not (
            stored.is_stacked or stored.is_flat
        )
        if stored.is_stacked and named.sharing == "qkv":
            named = Named(named.name, "qkv", "thirds")
        count = ranks if is_ranked else 1
        if stored.shape and stored.shape[0] % count:
            raise RejectedError(
                file.path,
                f"its {stored.shape[0]} rows are not those of {count} ranks",
                remedy="check tensor_model_parallel_size in the model file",
            )
        local = (stored.shape[0] // count, *stored.shape[1:]) if stored.shape else ()
        size = stored.tensor.numel // count
        for rank in range(count):
            yield (
                named,
                Fragment(
                    tp_rank=rank,
                    local_shape=local,
                    start=0,
                    stop=size,
                    dtype=stored.tensor.dtype,
                    source=TorchSource(file, stored.tensor, rank * size),
                    tp_size=count,
                ),
            )

    def _stored(self, file: TorchFile, name: str) -> _Stored:
        value = file.value
        if isinstance(value, TensorRef):
            shape = self._shapes.get(name, value.shape)
            stored = _Stored(value, shape, is_flat=True)
        elif isinstance(value, dict) and isinstance(value.get("param"), TensorRef):
            tensor = value["param"]
            is_stacked = (
                value.get("param_n_sub_params") is not None
                or as_subparam(value.get("sub_param_shape")) is not None
            )
            stored = _Stored(tensor, tensor.shape, is_stacked=is_stacked)
        else:
            raise RejectedError(file.path, "it holds no 'param'", remedy="copy the file again")
        count = 1
        for extent in stored.shape:
            count *= extent
        if count != stored.tensor.numel:
            raise RejectedError(
                file.path,
                f"it has {stored.tensor.numel} elements where the model file says "
                f"{list(stored.shape)}",
                remedy="check that both are of one checkpoint",
            )
        return stored

    def keep_groups(self, path: Path) -> None:
        """Remember the optimizer's hyperparameters, where the conversion kept them."""
        if path.exists():
            state = open_torch_file(path).value
            if isinstance(state, dict):
                groups, scaler = state.get("param_groups"), state.get("loss_scaler")
                self._reading.keep_groups(groups, scaler, [])
                self._reading.keep_clipping(state)

    def step(self) -> int | None:
        """The optimizer's count of steps, from any parameter's."""
        for folder in self._parameters.values():
            if (folder / "step.pt").exists():
                file = open_torch_file(folder / "step.pt")
                if isinstance(file.value, TensorRef) and file.value.numel == 1:
                    return int(file.read(file.value).reshape(()))
                return file.value if type(file.value) is int else None
        return None


def _pipeline_names(parameters: Mapping[str, Path]) -> PipelineNames | None:
    """Layers by number, from names such as ``2.input_layernorm.weight``; None without pipeline."""
    layers: dict[int, list[str]] = {}
    for name in parameters:
        number, _, key = name.partition(".")
        if number.isdecimal() and len(number) < 7:
            layers.setdefault(int(number), []).append(key)
    is_pipeline = bool(layers) or any(name.startswith("tied_modules.") for name in parameters)
    return PipelineNames(layers) if is_pipeline else None
