"""Any checkpoint written as Megatron's own: one ``model_optim_rng.pt`` a model-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.errors import UnsupportedError
from mds_ckpt.files.file_operations import FileOperations, write_file
from mds_ckpt.megatron.naming import Named, megatron_order, stored_block_name, stored_module_name
from mds_ckpt.megatron.target_layout import LocalTensor, TargetLayout
from mds_ckpt.megatron.target_ranks import (
    MOMENTS,
    WORDS,
    RankedTarget,
    decay_groups,
    local_tensors,
    merged_losses,
)
from mds_ckpt.pickles.torch_writer import ordered, save_torch_file
from mds_ckpt.plan import Loss, Options, Plan

__all__ = ["plan"]

TRACKER = "latest_checkpointed_iteration.txt"


def plan(
    checkpoint: Checkpoint,
    options: Options,
    *,
    layout: TargetLayout | None = None,
    is_release: bool = False,
) -> Plan:
    """What writing ``checkpoint`` for Megatron takes. Reads no tensor data.

    Args:
        checkpoint: Any opened checkpoint of a GPT.
        options: Type, vocabulary, and whether only weights are wanted.
        layout: Degrees of the target; one rank if None.
        is_release: Write ``release`` with all counts at 0, to fine-tune from.

    Raises:
        UnsupportedError: Megatron has no words for the model, or the layout does not fit it.
    """
    return _Writer(checkpoint, options, layout or TargetLayout(), is_release=is_release).plan()


class _Writer:
    def __init__(
        self, checkpoint: Checkpoint, options: Options, layout: TargetLayout, *, is_release: bool
    ) -> None:
        self._target = RankedTarget(checkpoint, options, layout, is_release=is_release)
        self._checkpoint = checkpoint
        self._is_release = is_release
        self._stack = "decoder" if checkpoint.model.family == "gpt" else "encoder"
        if layout.pp_size > 1 and checkpoint.model.family == "t5":
            raise UnsupportedError(
                checkpoint.path, "a T5 model is written to one stage only", remedy="leave --pp out"
            )

    def plan(self) -> Plan:
        files = list(self._files())
        tensors = [tensor for _, value in files for tensor in local_tensors(value)]
        return Plan(
            used=self._target.used(),
            dropped=self._target.dropped(),
            num_targets=len(tensors),
            nbytes=sum(tensor.nbytes for tensor in tensors) + (len(files) << 16),
            write=lambda folder, operations: self._write(folder, files, operations),
            notes=self._target.notes(),
        )

    def _write(
        self, folder: Path, files: Sequence[tuple[str, Any]], operations: FileOperations
    ) -> Sequence[Loss]:
        self._target.losses.clear()
        name = "release" if self._is_release else f"iter_{self._target.progress.iteration:07d}"
        operations.make_folder(folder / name)
        for rank, value in files:
            operations.make_folder(folder / name / rank)
            save_torch_file(
                folder / name / rank / "model_optim_rng.pt", value, operations=operations
            )
            operations.sync_folder(folder / name / rank)
        operations.sync_folder(folder / name)
        text = "release" if self._is_release else str(self._target.progress.iteration)
        write_file(folder / TRACKER, text.encode(), operations=operations)
        return merged_losses(self._target.losses)

    def _files(self) -> Iterator[tuple[str, dict[str, Any]]]:
        stages = self._target.stages
        for number, stage in enumerate(stages):
            for rank in range(self._target.layout.tp_size):
                name = f"mp_rank_{rank:02d}" + (f"_{number:03d}" if len(stages) > 1 else "")
                yield name, self._state(number, stage, rank)

    def _state(self, number: int, stage: range, rank: int) -> dict[str, Any]:
        names = list(self._stage_names(number, stage))
        state: dict[str, Any] = {
            "args": self._target.args(),
            "checkpoint_version": 3.0,
            "iteration": self._target.progress.iteration,
            "tokens": self._target.progress.tokens,
            "universal_checkpoint_info": {
                "universal_checkpoint_version": 0.2,
                "original_vocab_size": self._target.words,
                "padded_vocab_size": self._target.rows,
            },
            "model": self._model(names, rank),
        }
        schedule = self._checkpoint.training.get("schedule")
        if self._target.has_optimizer:
            state["optimizer"] = self._optimizer(names, rank)
            state["opt_param_scheduler"] = dict(schedule) if schedule else None
        return state

    def _stage_names(self, number: int, stage: range) -> Iterator[tuple[str, str, Named]]:
        """Canonical name, stored name and sharing of what a stage holds, in Megatron's order."""
        is_last = number == self._target.layout.pp_size - 1
        for name in sorted(self._checkpoint.tensors, key=megatron_order):
            stored = self._stored_name(name, stage, is_first=number == 0, is_last=is_last)
            if stored is not None:
                yield name, *stored
        if is_last and number and self._checkpoint.model.tied_embeddings:
            yield WORDS, "word_embeddings_for_head.weight", Named(WORDS, "vocab")

    def _stored_name(
        self, name: str, stage: range, *, is_first: bool, is_last: bool
    ) -> tuple[str, Named] | None:
        parts = name.split(".", 3)
        if parts[1] == "layers":
            number = int(parts[2])
            if number not in stage:
                return None
            is_t5 = self._checkpoint.model.family == "t5" and parts[0] == "decoder"
            block = stored_block_name(parts[3], has_cross_attention=is_t5)
            if block is None:
                raise self._target.unknown(name)
            place = f"language_model.{self._kind(parts[0])}.layers.{number - stage.start}"
            return f"{place}.{block[0]}", Named(name, block[1].sharing)
        if parts[1] == "final_layernorm":
            stored = f"language_model.{self._kind(parts[0])}.final_layernorm.{parts[2]}"
            return (stored, Named(name, "replicated")) if is_last else None
        module = stored_module_name(name)
        if module is None:
            raise self._target.unknown(name)
        return module if (is_first if name.startswith("embedding.") else is_last) else None

    def _kind(self, stack: str) -> str:
        return "encoder" if stack == self._stack else stack

    def _model(self, names: Sequence[tuple[str, str, Named]], rank: int) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for _, stored, named in names:
            _insert(tree, stored, self._target.local(named, rank, "weight"))
        return _ordered_tree(tree)

    def _optimizer(self, names: Sequence[tuple[str, str, Named]], rank: int) -> dict[str, Any]:
        """By number, decayed parameters first; fp32 masters beside where the weights are half."""
        target = self._target
        named = [named for _, _, named in names]
        groups = [(i, g) for i, g in enumerate(decay_groups(named, self._checkpoint.tensors)) if g]
        numbers = iter(range(len(names)))
        ids = [[next(numbers) for _ in group] for _, group in groups]
        state = {
            number: {
                "step": target.optimizer_step,
                **{moment: target.local(named, rank, moment) for moment in MOMENTS},
            }
            for numbers_, (_, group) in zip(ids, groups, strict=True)
            for number, named in zip(numbers_, group, strict=True)
        }
        param_groups = [
            {**target.hyperparameters(index), "params": params}
            for params, (index, _) in zip(ids, groups, strict=True)
        ]
        inner = {"state": state, "param_groups": param_groups}
        if "master" not in target.states:
            return inner
        masters = [[target.local(named, rank, "master") for named in group] for _, group in groups]
        return {"optimizer": inner, "fp32_from_fp16_params": masters}


def _insert(tree: dict[str, Any], name: str, value: LocalTensor) -> None:
    """Put a parameter where Megatron keeps it: the stacks are flat, the rest is nested."""
    parts = name.split(".")
    if parts[0] == "language_model" and parts[1] in ("encoder", "decoder"):
        tree.setdefault("language_model", {}).setdefault(parts[1], {})[".".join(parts[2:])] = value
    elif parts[0] == "lm_head":
        tree.setdefault("lm_head", {})[".".join(parts[1:])] = value
    elif parts[:2] == ["language_model", "pooler"]:
        tree.setdefault("language_model", {}).setdefault("pooler", {})[".".join(parts[2:])] = value
    else:
        for part in parts[:-1]:
            tree = tree.setdefault(part, {})
        tree[parts[-1]] = value


def _ordered_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Dictionaries as Megatron nests them; those with tensors are ordered ones, as torch writes."""
    if any(isinstance(value, LocalTensor) for value in tree.values()):
        return ordered(tree)  # type: ignore[return-value]
    return {
        key: _ordered_tree(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
    }
