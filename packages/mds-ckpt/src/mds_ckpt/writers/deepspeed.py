"""Any model written for Megatron-DeepSpeed: a pipeline's files or one module's, ZeRO 0 to 3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.errors import UnsupportedError, UsageError
from mds_ckpt.files.file_operations import FileOperations, write_file
from mds_ckpt.megatron.deepspeed_form import VERSION, DeepSpeedForm
from mds_ckpt.megatron.naming import expert_of
from mds_ckpt.megatron.pipeline_form import PipelineForm, pipeline_fault
from mds_ckpt.megatron.plain_form import PlainForm
from mds_ckpt.megatron.target_groups import ParameterGroup
from mds_ckpt.megatron.target_layout import TargetLayout
from mds_ckpt.megatron.target_ranks import local_tensors, merged_losses
from mds_ckpt.megatron.target_zero import flat_tensors, stage_3_state, whole_state, zero_state
from mds_ckpt.plan import Loss, Options, Plan, refuse_options
from mds_ckpt.writers.torch_files import write_torch_files

__all__ = ["form_of", "plan"]

_PREFIXES: Mapping[str, str] = {"BF16": "bf16_"}


def plan(checkpoint: Checkpoint, options: Options, *, layout: TargetLayout | None = None) -> Plan:
    """What writing ``checkpoint`` for Megatron-DeepSpeed takes. Reads no tensor data.

    Args:
        checkpoint: Any opened checkpoint of a GPT, BERT or T5.
        options: Type, vocabulary, and whether only weights are wanted.
        layout: Degrees of the target; one rank if None.

    Raises:
        UnsupportedError: Megatron-DeepSpeed has no words for the model, or the layout doesn't fit.
        UsageError: The layout contradicts itself.
    """
    return _Writer(checkpoint, options, layout or TargetLayout()).plan()


def form_of(checkpoint: Checkpoint, options: Options, layout: TargetLayout) -> DeepSpeedForm:
    """The pipeline's form, or that of one module, as the layout and the model have it."""
    refuse_options({"--vp": layout.vp_size > 1}, "DeepSpeed's stages have no model chunks")
    is_pipeline = layout.is_pipeline
    if is_pipeline is None:
        is_pipeline = layout.pp_size > 1 or _is_pipeline_usual(checkpoint, layout)
    if is_pipeline and layout.zero_stage > 1:
        raise UsageError(
            f"DeepSpeed has no ZeRO stage {layout.zero_stage} in a pipeline; choose --zero-stage 0 "
            f"or 1, or --no-pipeline and --pp 1"
        )
    if not is_pipeline and layout.pp_size > 1:
        raise UsageError("--no-pipeline writes one stage; leave --pp away, or --no-pipeline")
    form = (PipelineForm if is_pipeline else PlainForm)(checkpoint, options, layout)
    if layout.zero_stage == 3 and form.target.experts:
        raise UnsupportedError(
            checkpoint.path,
            "DeepSpeed has no ZeRO stage 3 for a model with experts",
            remedy="choose --zero-stage 0, 1 or 2",
        )
    return form


def _is_pipeline_usual(checkpoint: Checkpoint, layout: TargetLayout) -> bool:
    """Whether Megatron-DeepSpeed trains such a model in a pipeline unless it is told otherwise."""
    has_experts = any(expert_of(name) is not None for name in checkpoint.tensors)
    return pipeline_fault(checkpoint) is None and not has_experts and layout.zero_stage < 2


class _Writer:
    def __init__(self, checkpoint: Checkpoint, options: Options, layout: TargetLayout) -> None:
        self._form = form_of(checkpoint, options, layout)
        self._target = self._form.target
        self._layout = layout
        self._jobs = options.jobs
        if layout.zero_stage == 0:
            self._target.leave_masters()
        if layout.zero_stage == 3 and not self._target.has_optimizer:
            raise UnsupportedError(
                checkpoint.path,
                "stage 3 keeps weights in optimizer files, and there is no complete optimizer "
                "state to write",
                remedy="choose --zero-stage 0, 1 or 2",
            )

    def plan(self) -> Plan:
        files = dict(self._form.weight_files()) | dict(self._rank_files())
        tensors = [tensor for value in files.values() for tensor in local_tensors(value)]
        flats = [flat for value in files.values() for flat in flat_tensors(value)]
        sizes = [tensor.nbytes for tensor in tensors] + [flat.nbytes for flat in flats]
        return Plan(
            used=self._used(),
            dropped=self._target.dropped() | self._made_again(),
            num_targets=len(sizes),
            nbytes=sum(sizes) + (len(files) << 16),
            write=lambda folder, operations: self._write(folder, files, operations),
            notes=[*self._target.notes(), *self._notes()],
        )

    def _used(self) -> list[tuple[str, str]]:
        return [pair for pair in self._target.used() if pair not in self._made_again()]

    def _made_again(self) -> dict[tuple[str, str], str]:
        """Weights that are not written, because stage 3 has nothing but their masters."""
        if self._layout.zero_stage != 3 or not self._target.has_masters:
            return {}
        reason = "made again from the fp32 masters when it is loaded"
        return {("weight", name): reason for name in self._form.names}

    def _notes(self) -> list[str]:
        layout = self._layout
        form = "a pipeline" if isinstance(self._form, PipelineForm) else "one module, no pipeline"
        other = "--no-pipeline" if isinstance(self._form, PipelineForm) else "--pipeline"
        experts = f", ep {layout.ep_size}" if self._target.experts else ""
        shared = f"dp {layout.dp_size}{experts}, ZeRO stage {layout.zero_stage}"
        notes = [f"written for {form} ({other} for the other), {shared}"]
        if not self._target.has_optimizer:
            notes = [f"written for {form} ({other} for the other), without optimizer state"]
        elif layout.zero_stage == 0 and self._target.dtype != "F32":
            notes.append(
                "without ZeRO the optimizer's state is as torch's Adam has it; DeepSpeed's and "
                "apex' fused Adam need --zero-stage 1"
            )
        if self._form.checkpoint.config["num_layers"] % layout.pp_size:
            notes.append(
                "layers are divided as DeepSpeed 0.19 does; older ones may put the borders "
                "elsewhere and then refuse the optimizer files"
            )
        return notes

    def _write(
        self, folder: Path, files: Mapping[str, Any], operations: FileOperations
    ) -> Sequence[Loss]:
        self._target.losses.clear()
        name = f"global_step{self._target.progress.iteration}"
        operations.make_folder(folder / name)
        write_torch_files(folder / name, files, jobs=self._jobs, operations=operations)
        iteration = str(self._target.progress.iteration)
        tracker = folder / "latest_checkpointed_iteration.txt"
        write_file(tracker, iteration.encode(), operations=operations)
        write_file(folder / "latest", name.encode(), operations=operations)
        return merged_losses(self._target.losses)

    def _rank_files(self) -> Iterator[tuple[str, Any]]:
        for stage in range(self._layout.pp_size):
            for rank in range(self._layout.tp_size):
                number = stage * self._layout.tp_size + rank
                yield from self._files_of(stage, rank, number)

    def _files_of(self, stage: int, rank: int, number: int) -> Iterator[tuple[str, Any]]:
        layout, form = self._layout, self._form
        groups = [form.groups(stage, ep_rank) for ep_rank in range(layout.ep_size)]
        state = form.model_state(groups[0], stage, rank)
        if layout.zero_stage == 3:
            for dp in range(layout.dp_size):
                yield f"zero_pp_rank_{dp}_mp_rank_{number:02d}_model_states.pt", state
        elif layout.zero_stage == 0 and self._target.has_optimizer:
            yield from self._unshared(groups, stage, rank, state)
        else:
            yield f"mp_rank_{number:02d}_model_states.pt", state
        if not layout.zero_stage or not self._target.has_optimizer:
            return
        prefix = _PREFIXES.get(self._target.dtype, "")
        share_out = stage_3_state if layout.zero_stage == 3 else zero_state
        for dp in range(layout.dp_size):
            inner = share_out(form, groups[dp % layout.ep_size], rank, dp)
            file = f"{prefix}zero_pp_rank_{dp}_mp_rank_{number:02d}_optim_states.pt"
            outer = {"optimizer_state_dict": inner, "ds_config": {}, "ds_version": VERSION}
            yield file, outer

    def _unshared(
        self, groups: Sequence[Sequence[ParameterGroup]], stage: int, rank: int, state: Any
    ) -> Iterator[tuple[str, Any]]:
        """Without ZeRO: the state is in the model file, or with experts in a file of each share."""
        form, number = self._form, stage * self._layout.tp_size + rank
        has_experts = form.has_experts(stage)
        if not has_experts:
            state = state | {"optimizer": whole_state(form, groups[0], rank)}
        yield f"mp_rank_{number:02d}_model_states.pt", state
        for ep_rank, mine in enumerate(groups if has_experts else ()):
            inner = {"optimizer": whole_state(form, mine, rank)}
            yield f"expp_rank_{ep_rank}_mp_rank_{number:02d}_optim_states.pt", inner
