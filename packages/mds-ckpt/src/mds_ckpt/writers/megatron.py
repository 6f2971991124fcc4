"""Any checkpoint written as Megatron's own: one ``model_optim_rng.pt`` a model-parallel rank.

With the distributed optimizer, its state lies in a file of its own beside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.errors import UnsupportedError
from mds_ckpt.files.file_operations import FileOperations, write_file
from mds_ckpt.megatron.distributed_optimizer import FILE as DISTRIBUTED
from mds_ckpt.megatron.module_tree import module_tree, plain_name
from mds_ckpt.megatron.naming import Named, megatron_order
from mds_ckpt.megatron.target_distributed import buffers, settings_alone
from mds_ckpt.megatron.target_groups import Member, divide_groups
from mds_ckpt.megatron.target_layout import TargetLayout
from mds_ckpt.megatron.target_ranks import (
    MOMENTS,
    WORDS,
    RankedTarget,
    local_tensors,
    merged_losses,
)
from mds_ckpt.megatron.target_zero import flat_tensors
from mds_ckpt.pickles.records import Namespace
from mds_ckpt.plan import Loss, Options, Plan
from mds_ckpt.writers.torch_files import write_torch_files

__all__ = ["plan"]

TRACKER = "latest_checkpointed_iteration.txt"


def plan(checkpoint: Checkpoint, options: Options, *, layout: TargetLayout | None = None) -> Plan:
    """What writing ``checkpoint`` for Megatron takes. Reads no tensor data.

    Args:
        checkpoint: Any opened checkpoint of a GPT.
        options: Type, vocabulary, whether only weights are wanted, and whether to write
            ``release`` to train from anew.
        layout: Degrees of the target; one rank if None.

    Raises:
        UnsupportedError: Megatron has no words for the model, or the layout does not fit it.
    """
    return _Writer(checkpoint, options, layout or TargetLayout()).plan()


class _Writer:
    def __init__(self, checkpoint: Checkpoint, options: Options, layout: TargetLayout) -> None:
        self._target = RankedTarget(checkpoint, options, layout)
        self._is_distributed = options.distributed_optimizer and self._target.has_optimizer
        self._target.leave_masters()
        self._checkpoint = checkpoint
        self._is_release = options.is_release
        self._jobs = options.jobs
        self._chunks = self._divided()
        if self._target.experts:
            raise UnsupportedError(
                checkpoint.path,
                "Megatron's own checkpoints hold no experts as Megatron-DeepSpeed has them",
                remedy="convert it with --to deepspeed",
            )
        if layout.pp_size > 1 and checkpoint.model.family == "t5":
            raise UnsupportedError(
                checkpoint.path, "a T5 model is written to one stage only", remedy="leave --pp out"
            )
        if options.distributed_optimizer:
            self._check_distributed()

    def _check_distributed(self) -> None:
        if not self._is_distributed:
            raise UnsupportedError(
                self._checkpoint.path,
                "it has no complete optimizer state to write as a distributed optimizer's",
                remedy="leave --use-distributed-optimizer away",
            )
        if self._checkpoint.model.family == "bert" and self._target.layout.pp_size > 1:
            raise UnsupportedError(
                self._checkpoint.path,
                "the distributed optimizer's file lies in the model's order, which for BERT in "
                "stages is not that of its model file",
                remedy="leave --pp or --use-distributed-optimizer away",
            )

    def plan(self) -> Plan:
        files = list(self._files())
        sizes = [tensor.nbytes for _, value in files for tensor in local_tensors(value)]
        sizes += [flat.nbytes for _, value in files for flat in flat_tensors(value)]
        return Plan(
            used=self._target.used(),
            dropped=self._target.dropped(),
            num_targets=len(sizes),
            nbytes=sum(sizes) + (len(files) << 16),
            write=lambda folder, operations: self._write(folder, files, operations),
            notes=self._target.notes(),
        )

    def _write(
        self, folder: Path, files: Sequence[tuple[str, Any]], operations: FileOperations
    ) -> Sequence[Loss]:
        self._target.losses.clear()
        name = "release" if self._is_release else f"iter_{self._target.progress.iteration:07d}"
        operations.make_folder(folder / name)
        write_torch_files(folder / name, dict(files), jobs=self._jobs, operations=operations)
        text = "release" if self._is_release else str(self._target.progress.iteration)
        write_file(folder / TRACKER, text.encode(), operations=operations)
        return merged_losses(self._target.losses)

    def _files(self) -> Iterator[tuple[str, Any]]:
        stages = self._target.layout.pp_size
        for number in range(stages):
            count = len(self._chunks[number])
            chunks = [list(self._chunk(number, chunk)) for chunk in range(count)]
            for rank in range(self._target.layout.tp_size):
                name = f"mp_rank_{rank:02d}" + (f"_{number:03d}" if stages > 1 else "")
                yield f"{name}/model_optim_rng.pt", self._state(chunks, number, rank)
                if self._is_distributed:
                    yield f"{name}/{DISTRIBUTED}", buffers(self._target, chunks, rank)

    def _args(self) -> Namespace:
        known = {"use_distributed_optimizer": self._is_distributed}
        return Namespace({**self._target.args().fields, **known})

    def _state(self, chunks: Sequence[Sequence[Member]], number: int, rank: int) -> dict[str, Any]:
        state: dict[str, Any] = {
            "args": self._args(),
            "checkpoint_version": 3.0,
            "iteration": self._target.progress.iteration,
            "tokens": self._target.progress.tokens,
            "universal_checkpoint_info": {
                "universal_checkpoint_version": 0.2,
                "original_vocab_size": self._target.words,
                "padded_vocab_size": self._target.rows,
            },
            **self._target.random_state(rank, number),
        }
        for chunk, members in enumerate(chunks):
            tensors = [(m.stored, self._target.local(m.named, rank, "weight")) for m in members]
            state[f"model{chunk}" if len(chunks) > 1 else "model"] = module_tree(tensors)
        schedule = self._checkpoint.training.get("schedule")
        if self._target.has_optimizer:
            members = [member for chunk in chunks for member in chunk]
            state["optimizer"] = self._optimizer(members, rank)
            state["opt_param_scheduler"] = dict(schedule) if schedule else None
        return state

    def _divided(self) -> list[list[range]]:
        """The layers of each stage's model chunks."""
        layout, count = self._target.layout, self._checkpoint.config["num_layers"]
        if layout.vp_size == 1:
            return [[layers] for layers in self._target.stages]
        chunk, left = divmod(count, layout.pp_size * layout.vp_size)
        if left or layout.pp_size == 1:
            raise UnsupportedError(
                self._checkpoint.path,
                f"{count} layers can't be divided evenly among {layout.vp_size} chunks of "
                f"{layout.pp_size} pipeline stages",
                remedy="choose another --vp, and a --pp above 1",
            )
        first = [
            [c * layout.pp_size + p for c in range(layout.vp_size)] for p in range(layout.pp_size)
        ]
        return [[range(n * chunk, (n + 1) * chunk) for n in numbers] for numbers in first]

    def _chunk(self, stage: int, chunk: int) -> Iterator[Member]:
        """What a chunk of a stage holds, in Megatron's order."""
        is_first = (stage, chunk) == (0, 0)
        is_last = stage == len(self._chunks) - 1 and chunk == len(self._chunks[stage]) - 1
        layers = self._chunks[stage][chunk]
        for name in sorted(self._checkpoint.tensors, key=megatron_order):
            parts = name.split(".", 3)
            if parts[1] == "layers":
                is_here = int(parts[2]) in layers
            else:
                is_here = is_first if name.startswith("embedding.") else is_last
            if is_here:
                family = self._checkpoint.model.family
                found = plain_name(name, family=family, first_layer=layers.start)
                if found is None:
                    raise self._target.unknown(name)
                yield Member(found[1], found[0])
        if is_last and not is_first and self._checkpoint.model.tied_embeddings:
            yield Member(Named(WORDS, "vocab"), "word_embeddings_for_head.weight")

    def _optimizer(self, members: Sequence[Member], rank: int) -> dict[str, Any]:
        """By number, decayed parameters first; fp32 masters beside where the weights are half."""
        target = self._target
        groups = [g for g in divide_groups(members, self._checkpoint.tensors) if g.members]
        if self._is_distributed:
            return dict(settings_alone(target, groups))
        state: dict[int, Any] = {}
        param_groups = []
        for group in groups:
            numbers = range(len(state), len(state) + len(group.members))
            param_groups.append({**target.settings(group), "params": list(numbers)})
            for number, member in zip(numbers, group.members, strict=True):
                moments = {m: target.local(member.named, rank, m) for m in MOMENTS}
                state[number] = {"step": target.optimizer_step, **moments}
        inner = {"state": state, "param_groups": param_groups}
        if target.dtype == "F32":
            return inner
        masters = [
            [target.local(member.named, rank, "master") for member in group.members]
            for group in groups
        ]
        return {"optimizer": inner, "fp32_from_fp16_params": masters}
