"""Optimizer state of DeepSpeed runs without ZeRO: whole tensors, by number, on every rank.

The numbers count the parameters that a rank holds. Without a pipeline these are its module's; in a
pipeline they are those of its stage, whose layers are told by how many parameters there are; a
model with experts keeps a file for each share of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mds_ckpt.megatron.deepspeed_folder import Listing
from mds_ckpt.megatron.indexed_state import (
    IndexedError,
    group_names,
    indexed_count,
    indexed_groups,
    indexed_parts,
    indexed_scaler,
    indexed_step,
)
from mds_ckpt.megatron.legacy_model import Degrees
from mds_ckpt.megatron.naming import flatten
from mds_ckpt.megatron.pipeline_names import PipelineNames
from mds_ckpt.megatron.zero import FlatPart, is_expert
from mds_ckpt.pickles.archive import TorchFile
from mds_ckpt.pickles.records import Opaque, TensorRef
from mds_ckpt.pickles.torch_files import TorchFiles

__all__ = ["Unshared", "UnsharedState"]

Parameters = Mapping[str, TensorRef]


@dataclass(frozen=True, slots=True)
class Unshared:
    """What one file holds of one rank's optimizer."""

    file: TorchFile
    optimizer: Any
    parameters: Parameters
    """The rank's parameters as the engine calls them, in the order of the model."""

    def parts(self) -> list[tuple[FlatPart, tuple[int, ...]]]:
        """The states with each parameter's local shape; IndexedError if they don't fit."""
        return list(indexed_parts(self.file, self.optimizer, self.parameters))

    def groups(self) -> tuple[list[Any] | None, Opaque | None, list[list[str]]]:
        """Settings of the groups, the loss scaler, and the groups' names of parameters."""
        scaler = indexed_scaler(self.optimizer)
        return indexed_groups(self.optimizer), scaler, group_names(self.parameters)

    def step(self) -> int | None:
        """The optimizer's own count of steps."""
        return indexed_step(self.file, self.optimizer)


class UnsharedState:
    """The optimizer's state in model files, and in the experts' optimizer files.

    Args:
        listing: The folder's files.
        files: Opens them.
        degrees: The layout.
        names: Names of a pipeline's parameters; empty without one.
    """

    def __init__(
        self, listing: Listing, files: TorchFiles, degrees: Degrees, names: PipelineNames
    ) -> None:
        self._listing = listing
        self._files = files
        self._degrees = degrees
        self._names = names

    def of_rank(self, rank: int) -> Iterator[Unshared]:
        """What a model-parallel rank's files hold; nothing if they hold no optimizer.

        Raises:
            IndexedError: The parameters that belong to the state can't be told.
        """
        path = self._listing.models.get((rank,))
        file = None if path is None else self._files.open(path)
        shares = {ep: p for (ep, mp), p in self._listing.expert_optimizers.items() if mp == rank}
        for ep_rank, share in sorted(shares.items()):
            mine = self._files.open(share)
            if optimizer := mine.value.get("optimizer"):
                parameters = self._module(file, rank) if file else {}
                experts = self._experts(rank, ep_rank, len(shares))
                # What is not shared out is the same in every share.
                yield Unshared(mine, optimizer, {**parameters, **experts})
        if not shares and file is not None and (optimizer := file.value.get("optimizer")):
            has_files = self._has_files(*divmod(rank, self._degrees.tp))
            parameters = self._stage(rank) if has_files else self._module(file, rank)
            yield Unshared(file, optimizer, parameters)

    def _has_files(self, stage: int, tp_rank: int) -> bool:
        """Whether a stage's layers have files of their own, as those without experts have."""
        path = self._listing.models.get((stage * self._degrees.tp + tp_rank,))
        module = None if path is None else self._files.open(path).value.get("module")
        return bool(self._listing.layers) and module is None

    def _module(self, file: TorchFile, rank: int) -> dict[str, TensorRef]:
        module = file.value.get("module")
        if not isinstance(module, Mapping):
            raise IndexedError("the model file has no module")
        return {
            name: tensor
            for name, tensor in flatten(module)
            if isinstance(tensor, TensorRef) and not is_expert(name)
        }

    def _experts(self, rank: int, ep_rank: int, ep_size: int) -> dict[str, TensorRef]:
        """A share's experts by their global names, layer by layer."""
        counts: dict[int, int] = {}
        for layer, expert, mp in self._listing.experts:
            if mp == rank:  # each pipeline stage counts its layers with experts from 0
                counts[layer] = max(counts.get(layer, 0), expert + 1)
        found: dict[str, TensorRef] = {}
        for (layer, expert, mp), path in sorted(self._listing.experts.items()):
            if mp == rank and expert // max(1, counts[layer] // ep_size) == ep_rank:
                tensors = flatten(self._files.open(path).value)
                found |= {key: tensor for key, tensor in tensors if isinstance(tensor, TensorRef)}
        return found

    def _stage(self, rank: int) -> dict[str, TensorRef]:
        stage, tp_rank = divmod(rank, self._degrees.tp)
        plan = _Stages(self._layers(tp_rank), self._names)
        first = 0
        for number in range(stage):
            if self._has_files(number, tp_rank):
                first += plan.blocks(number, self._degrees.pp, self._count(number, tp_rank))
        count = plan.blocks(stage, self._degrees.pp, self._count(stage, tp_rank))
        return plan.parameters(stage, self._degrees.pp, range(first, first + count))

    def _layers(self, tp_rank: int) -> dict[int, dict[str, TensorRef]]:
        layers = {}
        for (layer, rank), path in sorted(self._listing.layers.items()):
            if rank == tp_rank:
                tensors = flatten(self._files.open(path).value)
                layers[layer] = {k: t for k, t in tensors if isinstance(t, TensorRef)}
        return layers

    def _count(self, stage: int, tp_rank: int) -> int:
        path: Path | None = self._listing.models.get((stage * self._degrees.tp + tp_rank,))
        optimizer = None if path is None else self._files.open(path).value.get("optimizer")
        count = None if optimizer is None else indexed_count(optimizer)
        if count is None:
            raise IndexedError("its flat groups do not say which layers the stage holds")
        return count


class _Stages:
    """Which layers a pipeline stage holds, from how many parameters its optimizer has."""

    def __init__(self, layers: Mapping[int, Parameters], names: PipelineNames) -> None:
        blocks = [number for number in layers if names.is_block(number)]
        self._layers = layers
        self._blocks = blocks
        self._before = [number for number in layers if number < blocks[0]] if blocks else []
        self._behind = [number for number in layers if number > blocks[-1]] if blocks else []
        keys = {key for number in self._behind for key in layers[number]}
        self._is_tied = not any("lm_head" in key or "final_linear" in key for key in keys)

    def _outside(self, stage: int, stages: int) -> tuple[list[int], list[int]]:
        is_last = stage == stages - 1
        before = self._before if stage == 0 or (is_last and self._is_tied) else []
        return before, self._behind if is_last else []

    def blocks(self, stage: int, stages: int, count: int) -> int:
        """How many blocks a stage of ``count`` parameters holds."""
        before, behind = self._outside(stage, stages)
        count -= sum(len(self._layers[number]) for number in (*before, *behind))
        sizes = {len(self._layers[number]) for number in self._blocks}
        if len(sizes) != 1 or count % (size := sizes.pop()) or count < 0:
            raise IndexedError(f"the layers of stage {stage} can't be told by its parameters")
        return count // size

    def parameters(self, stage: int, stages: int, blocks: range) -> dict[str, TensorRef]:
        """A stage's parameters as the engine calls them, tied modules first."""
        if blocks.stop > len(self._blocks):
            raise IndexedError(f"stage {stage} has more layers than there are files")
        before, behind = self._outside(stage, stages)
        found: dict[str, TensorRef] = {}
        for number in before:
            place = "tied_modules.embed" if self._is_tied else str(number)
            found |= {f"{place}.{key}": ref for key, ref in self._layers[number].items()}
        for number in (*self._blocks[blocks.start : blocks.stop], *behind):
            found |= {f"{number}.{key}": ref for key, ref in self._layers[number].items()}
        return found
