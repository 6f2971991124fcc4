"""Any GPT written as a Megatron-DeepSpeed pipeline checkpoint: layer, model and ZeRO-1 files.

The flat partitions are streamed: parameters lie end to end in the order of the engine's groups,
padded to twice the data-parallel size, and each data-parallel rank's file holds an equal share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.files.file_operations import FileOperations, write_file
from mds_ckpt.megatron.naming import Named, megatron_order
from mds_ckpt.megatron.pipeline_form import VERSION, PipelineForm, step_tensor
from mds_ckpt.megatron.target_layout import LocalTensor, TargetLayout
from mds_ckpt.megatron.target_ranks import (
    MOMENTS,
    local_tensors,
    merged_losses,
)
from mds_ckpt.pickles.records import EnumRecord, Global, Opaque
from mds_ckpt.pickles.torch_writer import StreamedArray, ordered, save_torch_file
from mds_ckpt.plan import Loss, Options, Plan
from mds_ckpt.tensors.dtype import ITEM_SIZES, numpy_dtype

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["plan"]

_FRAGMENT = Global("deepspeed.utils.tensor_fragment", "fragment_address")
_STAGE = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")
_PREFIXES: Mapping[str, str] = {"BF16": "bf16_"}


def plan(checkpoint: Checkpoint, options: Options, *, layout: TargetLayout | None = None) -> Plan:
    """What writing ``checkpoint`` for Megatron-DeepSpeed takes. Reads no tensor data.

    Args:
        checkpoint: Any opened checkpoint of a GPT.
        options: Type, vocabulary, and whether only weights are wanted.
        layout: Degrees of the target; one rank if None.

    Raises:
        UnsupportedError: Megatron-DeepSpeed has no words for the model, or the layout doesn't fit.
    """
    return _Writer(checkpoint, options, layout or TargetLayout()).plan()


class FlatShare(StreamedArray):
    """Elements ``[start, stop)`` of local tensors that lie end to end; zeros behind them."""

    def __init__(self, parts: Sequence[LocalTensor], start: int, stop: int, dtype: str) -> None:
        self._parts = parts
        self._start = start
        self._stop = stop
        self._dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """One dimension."""
        return (self._stop - self._start,)

    @property
    def dtype(self) -> Any:
        """Numpy element type."""
        return numpy_dtype(self._dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the share."""
        return (self._stop - self._start) * ITEM_SIZES[self._dtype]

    def blocks(self) -> Iterator[Array]:
        """The values, one parameter at a time."""
        import numpy as np

        at = 0
        for part in self._parts:
            count = math.prod(part.shape)
            low, high = max(self._start, at), min(self._stop, at + count)
            if low < high:
                yield part.numpy().reshape(-1)[low - at : high - at]
            at += count
        rest = self._stop - max(self._start, min(at, self._stop))
        if rest:
            yield np.zeros(rest, self.dtype)


class _Writer:
    def __init__(self, checkpoint: Checkpoint, options: Options, layout: TargetLayout) -> None:
        self._form = PipelineForm(checkpoint, options, layout)
        self._target = self._form.target
        self._checkpoint = checkpoint
        self._layout = layout

    def plan(self) -> Plan:
        files = dict(self._layer_files()) | dict(self._rank_files())
        tensors = [tensor for value in files.values() for tensor in local_tensors(value)]
        shares = [share for value in files.values() for share in _shares(value)]
        sizes = [tensor.nbytes for tensor in tensors] + [share.nbytes for share in shares]
        notes = self._target.notes()
        if self._checkpoint.config["num_layers"] % self._layout.pp_size:
            notes.append(
                "layers are not divided evenly among stages; DeepSpeed may put the border elsewhere"
                " and then refuses the optimizer files"
            )
        return Plan(
            used=self._target.used(),
            dropped=self._target.dropped(),
            num_targets=len(sizes),
            nbytes=sum(sizes) + (len(files) << 16),
            write=lambda folder, operations: self._write(folder, files, operations),
            notes=notes,
        )

    def _write(
        self, folder: Path, files: Mapping[str, Any], operations: FileOperations
    ) -> Sequence[Loss]:
        self._target.losses.clear()
        name = f"global_step{self._target.progress.iteration}"
        operations.make_folder(folder / name)
        for file, value in files.items():
            save_torch_file(folder / name / file, value, operations=operations)
        operations.sync_folder(folder / name)
        iteration = str(self._target.progress.iteration)
        tracker = folder / "latest_checkpointed_iteration.txt"
        write_file(tracker, iteration.encode(), operations=operations)
        write_file(folder / "latest", name.encode(), operations=operations)
        return merged_losses(self._target.losses)

    def _layer_files(self) -> Iterator[tuple[str, Any]]:
        layers: dict[int, list[tuple[str, str]]] = {}
        for name in sorted(self._checkpoint.tensors, key=megatron_order):
            layer, key = self._form.place(name)
            layers.setdefault(layer, []).append((key, name))
        for layer, keys in sorted(layers.items()):
            for rank in range(self._layout.tp_size):
                tensors = {
                    key: self._target.local(self._form.named(name), rank, "weight")
                    for key, name in keys
                }
                yield f"layer_{layer:02d}-model_{rank:02d}-model_states.pt", ordered(tensors)

    def _rank_files(self) -> Iterator[tuple[str, Any]]:
        for stage in range(self._layout.pp_size):
            for rank in range(self._layout.tp_size):
                number = stage * self._layout.tp_size + rank
                groups = self._form.groups(stage)
                yield f"mp_rank_{number:02d}_model_states.pt", self._form.model_state(groups, rank)
                for dp in range(self._layout.dp_size if self._target.has_optimizer else 0):
                    prefix = _PREFIXES.get(self._target.dtype, "")
                    name = f"{prefix}zero_pp_rank_{dp}_mp_rank_{number:02d}_optim_states.pt"
                    yield name, self._optimizer_file(groups, rank, dp)

    def _optimizer_file(self, groups: list[list[Named]], rank: int, dp: int) -> dict[str, Any]:
        target, count = self._target, self._layout.dp_size
        masters = "master" if "master" in target.states else "weight"
        shares, moments, paddings, mappings = [], {}, [], []
        for number, group in enumerate(groups):
            sizes = [math.prod(target.local(named, rank, "weight").shape) for named in group]
            total = sum(sizes)
            share = (total + -total % (2 * count)) // count
            start, stop = dp * share, (dp + 1) * share
            # DeepSpeed stores masters without the padding of the last ranks, moments with it.
            real = max(start, min(stop, total))
            shares.append(self._share(group, rank, masters, start, real))
            paddings.append(stop - real)
            moments[number] = {
                "step": step_tensor(target.optimizer_step),
                **{m: self._share(group, rank, m, start, stop) for m in MOMENTS},
            }
            mappings.append(self._mapping(group, sizes, start, stop))
        scaler = target.loss_scaler()
        state = {
            "loss_scaler": scaler,
            "dynamic_loss_scale": scaler.cls.name == "DynamicLossScaler",
            "overflow": False,
            "clip_grad": 1.0,
            "base_optimizer_state": {
                "state": moments,
                "param_groups": [
                    {**target.hyperparameters(number), "params": [number]}
                    for number in range(len(groups))
                ],
            },
            "single_partition_of_fp32_groups": shares,
            "zero_stage": EnumRecord(_STAGE, 1),
            "group_paddings": paddings,
            "param_alignment_paddings": [[0] * len(group) for group in groups],
            "partition_count": [count] * len(groups),
            "ds_version": VERSION,
            "param_slice_mappings": mappings,
        }
        return {"optimizer_state_dict": state, "ds_config": {}, "ds_version": VERSION}

    def _share(
        self, group: Sequence[Named], rank: int, state: str, start: int, stop: int
    ) -> FlatShare:
        parts = [self._target.local(named, rank, state) for named in group]
        return FlatShare(parts, start, stop, "F32")

    def _mapping(
        self, group: Sequence[Named], sizes: Sequence[int], start: int, stop: int
    ) -> Opaque:
        at, mapping = 0, {}
        for named, count in zip(group, sizes, strict=True):
            low, high = max(start, at), min(stop, at + count)
            if low < high:
                place = {"numel": high - low, "start": low - start}
                mapping[self._form.engine_name(named.name)] = Opaque(_FRAGMENT, state=place)
            at += count
        return ordered(mapping)


def _shares(value: Any) -> Iterator[FlatShare]:
    if isinstance(value, FlatShare):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _shares(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _shares(item)
