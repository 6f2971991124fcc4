"""Any model written as DeepSpeed's universal checkpoint: model files, and one folder a parameter.

Names and model files are those of the pipeline, or of one module. The tensors are whole, joined
over ranks as ``ds_to_universal`` joins them, so that DeepSpeed cuts them for any layout when it
loads them. Experts carry their number in the whole model.

ZeRO stage 3 looks for its model file under another name and for the settings in another place, and
cuts tensors as they lie: there the vocabulary keeps its padding rows, which other stages add.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.errors import UnsupportedError, UsageError
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


def _stage(checkpoint: Checkpoint, options: Options) -> int:
    """The ZeRO stage that is to load it: as asked, or the source's own where that is stage 3."""
    if options.zero_stage == 0:
        raise UsageError(
            "DeepSpeed loads universal checkpoints in ZeRO stages 1 to 3; leave --zero-stage 0 away"
        )
    if options.zero_stage is not None:
        return options.zero_stage
    is_plain = options.pipeline is not True and checkpoint.parallel.get("zero_stage") == 3
    return 3 if is_plain else 1


class _Writer:
    def __init__(self, checkpoint: Checkpoint, options: Options) -> None:
        # One rank: the tensors are whole, and the rows of thirds lie as one rank has them.
        layout = TargetLayout(
            is_pipeline=options.pipeline,
            divisible_by=options.divisible_by,
            zero_stage=_stage(checkpoint, options),
        )
        self._form = form_of(checkpoint, options, layout)
        self._is_stage_3 = layout.zero_stage == 3
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
        target, again = self._form.target, self._made_again()
        return Plan(
            used=[pair for pair in target.used() if pair not in again],
            dropped=target.dropped() | again,
            num_targets=len(tensors),
            nbytes=sum(tensor.nbytes for tensor in tensors) + (len(files) << 12),
            write=lambda folder, operations: self._write(folder, files, operations),
            notes=[*target.notes(), *self._notes()],
        )

    def _made_again(self) -> dict[tuple[str, str], str]:
        """Weights that no file holds: a pipeline's model file has none, nor has stage 3's."""
        is_held = isinstance(self._form, PlainForm) and not self._is_stage_3
        if is_held or not self._form.target.has_masters:
            return {}
        reason = "made again from the fp32 masters when it is loaded"
        return {("weight", name): reason for name in self._form.names}

    def _notes(self) -> list[str]:
        notes = []
        if isinstance(self._form, PlainForm):
            notes.append("names are those of one module without pipeline (--pipeline for others)")
        if self._is_stage_3:
            notes.append(
                "it is for ZeRO stage 3 (--zero-stage 1 for stages 1 and 2); DeepSpeed's stage 3 "
                "gives every group of parameters the settings of the first, weight decay too"
            )
        elif isinstance(self._form, PlainForm):
            notes.append("it is for ZeRO stages 1 and 2 (--zero-stage 3 for stage 3)")
        if self._form.target.experts:
            notes.append(
                "experts are numbered over the whole model; DeepSpeed itself loads them with one "
                "expert-parallel rank only"
            )
        return notes

    def _files(self) -> Iterator[tuple[str, Any]]:
        target = self._form.target
        state = self._form.model_state(self._form.groups(0), 0, 0)
        if not isinstance(self._form, PlainForm):
            # Stages with experts keep weights here, which DeepSpeed does not read with this format.
            state["module"] = None
        yield "mp_rank_00_model_states.pt", state
        if self._is_stage_3:
            yield "zero_pp_rank_0_mp_rank_00_model_states.pt", state
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
            rows = self._form.target.rows if self._is_stage_3 else self._form.target.words
            return {"cat_dim": 0, "vocab_tensor": True, "param": tensor.cut_rows(rows)}
        if named.sharing == "row":
            return {"cat_dim": 1, "param": tensor}
        if named.sharing == "gated" and self._form.is_gated:
            return {"cat_dim": 0, "param_n_sub_params": 2, "param": tensor}
        return {"cat_dim": 0, "param": tensor}

    def _optimizer_state(self) -> dict[str, Any]:
        target, groups = self._form.target, self._form.groups(0)
        scaler = target.loss_scaler()
        param_groups = [
            {**target.settings(group), "params": [number]} for number, group in enumerate(groups)
        ]
        stage_3 = {
            "state": {0: {"step": step_tensor(target.optimizer_step)}},
            "param_groups": param_groups,
        }
        return {
            "loss_scaler": scaler,
            "dynamic_loss_scale": scaler.cls.name == "DynamicLossScaler",
            "overflow": False,
            **target.clipping(),
            "zero_stage": self._form.layout.zero_stage,
            "group_paddings": [0] * len(groups),
            "partition_count": [1] * len(groups),
            "ds_version": VERSION,
            "param_groups": param_groups,
            **({"optimizer_state_dict": stage_3} if self._is_stage_3 else {}),
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
