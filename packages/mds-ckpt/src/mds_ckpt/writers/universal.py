"""Any model written as DeepSpeed's universal checkpoint: model files, and one folder a parameter.

Names and model files are those of the pipeline, or of one module. The tensors are whole, joined
over ranks as ``ds_to_universal`` joins them, so that DeepSpeed cuts them for any layout when it
loads them. Experts carry their number in the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.errors import UnsupportedError
from mds_ckpt.files.file_operations import FileOperations, write_file
from mds_ckpt.megatron.deepspeed_form import VERSION, step_tensor
from mds_ckpt.megatron.naming import Named
from mds_ckpt.megatron.plain_form import PlainForm
from mds_ckpt.megatron.target_layout import LocalTensor, TargetLayout
from mds_ckpt.megatron.target_ranks import MOMENTS, local_tensors, merged_losses
from mds_ckpt.plan import Loss, Options, Plan
from mds_ckpt.writers.deepspeed import form_of
from mds_ckpt.writers.torch_files import write_torch_files

__all__ = ["plan"]


def plan(checkpoint: Checkpoint, options: Options) -> Plan:
    """What writing ``checkpoint`` as a universal checkpoint takes. Reads no tensor data.

    Args:
        checkpoint: Any opened checkpoint of a GPT, BERT or T5.
        options: Type, vocabulary, and whether it is a pipeline's.

    Raises:
        UnsupportedError: Megatron-DeepSpeed has no words for the model, or the optimizer's state
            is missing, without which DeepSpeed does not load the format.
    """
    return _Writer(checkpoint, options).plan()


class _Writer:
    def __init__(self, checkpoint: Checkpoint, options: Options) -> None:
        # One rank: the tensors are whole, and the rows of thirds lie as one rank has them.
        layout = TargetLayout(is_pipeline=options.pipeline, divisible_by=options.divisible_by)
        self._form = form_of(checkpoint, options, layout)
        self._checkpoint = checkpoint
        self._jobs = options.jobs
        if not self._form.target.has_optimizer:
            raise UnsupportedError(
                checkpoint.path,
                "it has no complete optimizer state, without which DeepSpeed does not load "
                "universal checkpoints",
                remedy="convert it with --to deepspeed",
            )

    def plan(self) -> Plan:
        files = dict(self._files())
        tensors = [tensor for value in files.values() for tensor in local_tensors(value)]
        target = self._form.target
        reason = "made again from the fp32 masters when it is loaded"
        again = {("weight", name): reason for name in self._form.names if target.has_masters}
        return Plan(
            used=[pair for pair in target.used() if pair not in again],
            dropped=target.dropped() | again,
            num_targets=len(tensors),
            nbytes=sum(tensor.nbytes for tensor in tensors) + (len(files) << 12),
            write=lambda folder, operations: self._write(folder, files, operations),
            notes=[*target.notes(), *self._notes()],
        )

    def _notes(self) -> list[str]:
        notes = []
        if isinstance(self._form, PlainForm):
            notes.append("names are those of one module without pipeline (--pipeline for others)")
        if self._form.target.experts:
            notes.append(
                "experts are numbered over the whole model; DeepSpeed itself loads them with one "
                "expert-parallel rank only"
            )
        return notes

    def _files(self) -> Iterator[tuple[str, Any]]:
        target = self._form.target
        yield "mp_rank_00_model_states.pt", self._form.model_state(self._form.groups(0), 0, 0)
        yield "zero/optimizer_state.pt", self._optimizer_state()
        for name in self._form.names:
            named = self._form.named(name)
            folder = f"zero/{self._form.engine_name(name)}"
            for word, state in (("fp32", "master"), *((m, m) for m in MOMENTS)):
                yield f"{folder}/{word}.pt", self._entry(named, target.local(named, 0, state))
            yield f"{folder}/step.pt", step_tensor(target.optimizer_step)

    def _entry(self, named: Named, tensor: LocalTensor) -> dict[str, Any]:
        """The tensor, and how DeepSpeed has to cut it."""
        if named.sharing == "replicated":
            return {"param": tensor}
        if named.sharing == "vocab":
            words = tensor.cut_rows(self._form.target.words)
            return {"cat_dim": 0, "vocab_tensor": True, "param": words}
        if named.sharing == "row":
            return {"cat_dim": 1, "param": tensor}
        if named.sharing == "gated" and self._form.is_gated:
            return {"cat_dim": 0, "param_n_sub_params": 2, "param": tensor}
        return {"cat_dim": 0, "param": tensor}

    def _optimizer_state(self) -> dict[str, Any]:
        target, groups = self._form.target, self._form.groups(0)
        scaler = target.loss_scaler()
        return {
            "loss_scaler": scaler,
            "dynamic_loss_scale": scaler.cls.name == "DynamicLossScaler",
            "overflow": False,
            **target.clipping(),
            "zero_stage": 1,
            "group_paddings": [0] * len(groups),
            "partition_count": [1] * len(groups),
            "ds_version": VERSION,
            "param_groups": [
                {**target.settings(group), "params": [number]}
                for number, group in enumerate(groups)
            ],
        }

    def _write(
        self, folder: Path, files: Mapping[str, Any], operations: FileOperations
    ) -> Sequence[Loss]:
        target = self._form.target
        target.losses.clear()
        name = f"global_step{target.progress.iteration}_universal"
        operations.make_folder(folder / name)
        write_torch_files(folder / name, files, jobs=self._jobs, operations=operations)
        tracker = folder / "latest_checkpointed_iteration.txt"
        write_file(tracker, str(target.progress.iteration).encode(), operations=operations)
        write_file(folder / "latest_universal", name.encode(), operations=operations)
        return merged_losses(target.losses)
