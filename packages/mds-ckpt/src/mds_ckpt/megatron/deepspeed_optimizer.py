"""Read the optimizer files of a DeepSpeed checkpoint: fp32 masters and Adam's moments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mds_ckpt.checkpoint import LazyTensor
from mds_ckpt.errors import RejectedError
from mds_ckpt.megatron.assemble import Assembly, Fragment, MissingTensor
from mds_ckpt.megatron.deepspeed_folder import Listing
from mds_ckpt.megatron.indexed_state import IndexedError
from mds_ckpt.megatron.legacy_model import Degrees, ModelReading, known_name
from mds_ckpt.megatron.naming import Named, megatron_order
from mds_ckpt.megatron.pipeline_names import PipelineNames
from mds_ckpt.megatron.unshared_state import Unshared, UnsharedState
from mds_ckpt.megatron.zero import (
    FlatPart,
    LocalExperts,
    ZeroError,
    expert_ranks,
    is_expert,
    is_stage_3,
    optimizer_state,
    optimizer_step,
    shapes_of,
    split_parts,
    stage_3_parts,
    stage_of,
)
from mds_ckpt.pickles.archive import TorchFile
from mds_ckpt.pickles.records import TensorRef
from mds_ckpt.pickles.torch_files import TorchFiles

__all__ = ["OptimizerFiles"]


class OptimizerFiles:
    """The optimizer's side of one checkpoint.

    Args:
        listing: The folder's files.
        files: Opens them.
        reading: The model.
        degrees: The layout.
        names: Names of a pipeline's parameters; empty without one.
        shapes: Local shapes of the weights, by canonical name.
    """

    def __init__(
        self,
        listing: Listing,
        files: TorchFiles,
        reading: ModelReading,
        degrees: Degrees,
        names: PipelineNames,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._listing = listing
        self._files = files
        self._reading = reading
        self._degrees = degrees
        self._names = names
        self._shapes = shapes
        self._step: int | None = None
        self._ep_size = degrees.ep

    def _resolve(self, name: str) -> Named | None:
        if self._names:
            return self._names.canonical(name)
        return self._reading.canonical(name)

    def name_what_is_missing(
        self, states: dict[str, dict[str, LazyTensor]], reason: str | None
    ) -> None:
        """Parameters that lie in missing shards only: they are there, and can't be read."""
        weights = states.get("weight", {})
        for state, found in states.items():
            absent = [name for name in weights if name not in found]
            if state == "weight" or not absent:
                continue
            if reason is None:
                self._reading.note(f"{len(absent)} parameters have no {state} (they are frozen)")
                continue
            for name in absent:
                error = RejectedError(
                    self._listing.folder,
                    reason,
                    remedy="copy the files that are missing, or convert with --weights-only",
                    tensor=f"{name} ({state})",
                )
                found[name] = MissingTensor(name, weights[name].shape, "F32", error=error)

    def step(self) -> int | None:
        """The optimizer's own count of steps, or None."""
        for path in self._listing.optimizers.values():
            file = self._files.open(path)
            stored = optimizer_step(optimizer_state(file))
            return int(file.read(stored)) if isinstance(stored, TensorRef) else stored
        return self._step

    def add_to(self, assembly: Assembly) -> int:
        """Add masters and moments; return the ZeRO stage."""
        if not self._listing.optimizers:
            self._add_stage_0(assembly)
            return 0
        stage, kept = 1, []
        for rank in range(self._degrees.tp * self._degrees.pp):
            files = self._optimizer_files(rank, assembly)
            if not files:
                continue
            try:
                states = [optimizer_state(file) for file in files]
                stage = stage_of(states[0])
                # A stage without experts knows no better than the arguments.
                if (told := self._expert_ranks(states)) != self._degrees.ep:
                    self._ep_size = told
                kept.append(states[0])
                self._add_parts(assembly, rank, files, stage_3=is_stage_3(states[0]))
            except ZeroError as error:
                self._no_optimizer(files[0].path, str(error), stage)
        if kept:
            # A pipeline stage without experts lacks their groups.
            self._keep_groups(max(kept, key=lambda state: len(_param_groups(state) or ())))
        return stage

    def _keep_groups(self, state: Mapping[str, Any]) -> None:
        """Hyperparameters are the same on every rank; the names are gathered from all of them."""
        names: list[list[str]] = []
        for rank in range(self._degrees.tp * self._degrees.pp):
            for index, group in enumerate(self._param_shapes(rank) or ()):
                names.extend([] for _ in range(index + 1 - len(names)))
                names[index].extend(self._global_names(group))
        kept = [self._canonical_names(group) for group in names]
        self._reading.keep_groups(_param_groups(state), state.get("loss_scaler"), kept)
        self._reading.keep_clipping(state)

    def _global_names(self, group: Mapping[str, Any]) -> list[str]:
        """A group's names, with the experts of all ranks."""
        experts = LocalExperts(group)
        count = self._ep_size if any(is_expert(name) for name in group) else 1
        return [experts.global_name(name, rank) for rank in range(count) for name in group]

    def _canonical_names(self, names: Sequence[str]) -> list[str]:
        """Canonical names, each once, in their order; experts in the model's."""
        resolved = (self._resolve(name) for name in names)
        found = list({named.name: None for named in resolved if named is not None})
        return sorted(found, key=megatron_order) if any(map(is_expert, names)) else found

    def _expert_ranks(self, states: Sequence[Mapping[str, Any]]) -> int:
        found = {expert_ranks(state, len(states), self._degrees.ep) for state in states}
        told = found - {self._degrees.ep} or found
        if len(told) > 1 or len(states) % min(told):
            raise ZeroError(f"its files disagree on who shares out the experts: {sorted(found)}")
        return min(told)

    def _no_optimizer(self, path: Path, reason: str, stage: int) -> None:
        if stage == 3:
            raise RejectedError(path, reason, remedy="copy the files again") from None
        self._reading.note(f"optimizer files: {reason}; masters and moments are not read")

    def _optimizer_files(self, rank: int, assembly: Assembly) -> list[TorchFile]:
        ranks = sorted(dp for dp, mp in self._listing.optimizers if mp == rank)
        files = [self._files.open(self._listing.optimizers[dp, rank]) for dp in ranks]
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
                raise RejectedError(self._listing.folder, reason, remedy=remedy)
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
            parts = split_parts(files, shapes, ep_size=self._ep_size)
        elif shapes is None:
            raise ZeroError("the model file has no param_shapes")
        else:
            parts = stage_3_parts(files, shapes)
        local = {name: shape for group in shapes or () for name, shape in group.items()}
        for part in parts:
            self._add_part(assembly, rank, part, local.get(part.name))

    def _param_shapes(self, rank: int) -> Sequence[Mapping[str, tuple[int, ...]]] | None:
        path = self._listing.models.get((rank,)) or self._listing.stage_3_models.get((0, rank))
        return None if path is None else shapes_of(self._files.open(path).value.get("param_shapes"))

    def _add_part(
        self, assembly: Assembly, rank: int, part: FlatPart, shape: tuple[int, ...] | None
    ) -> None:
        stage = rank // self._degrees.tp
        named = known_name(part.source.file.path, self._resolve(part.name), part.name)
        named = self._reading.shared(named)
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
        unshared = UnsharedState(self._listing, self._files, self._degrees, self._names)
        everything: list[Unshared] = []
        for rank in range(self._degrees.tp * self._degrees.pp):
            try:
                found = list(unshared.of_rank(rank))
                parts = [each.parts() for each in found]
            except IndexedError as error:
                reason = f"model-parallel rank {rank}: {error}"
                self._reading.note(f"{reason}; moments are not read")
                assembly.incomplete = reason
                return
            for share, part, shape in _numbered(parts):
                if share == 0 or is_expert(part.name):
                    self._add_part(assembly, rank, part, shape)
            everything.extend(found)
        self._keep_unshared(everything)

    def _keep_unshared(self, found: Sequence[Unshared]) -> None:
        """Settings are the same on every rank; the names are gathered from all of them."""
        names: list[list[str]] = []
        most: list[Any] = []
        scaler = None
        for each in found:
            groups, scaler, mine = each.groups()
            most = max(most, groups or [], key=len)
            names.extend([] for _ in range(len(mine) - len(names)))
            for index, group in enumerate(mine):
                names[index].extend(group)
            self._step = self._step or each.step()
        if found:
            kept = [self._canonical_names(group) for group in names]
            self._reading.keep_groups(most, scaler, kept)


def _param_groups(state: Mapping[str, Any]) -> list[Any] | None:
    """The hyperparameters of a rank's groups."""
    base = state.get("base_optimizer_state") or state.get("optimizer_state_dict")
    groups = base.get("param_groups") if isinstance(base, Mapping) else None
    return groups if isinstance(groups, list) else None


def _numbered(
    shares: Sequence[Sequence[tuple[FlatPart, tuple[int, ...]]]],
) -> Iterator[tuple[int, FlatPart, tuple[int, ...]]]:
    for number, parts in enumerate(shares):
        for part, shape in parts:
            yield number, part, shape
