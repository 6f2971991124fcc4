"""Any checkpoint written as Megatron's own: one ``model_optim_rng.pt`` a model-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mds_ckpt.checkpoint import Checkpoint, LazyTensor
from mds_ckpt.errors import UnsupportedError
from mds_ckpt.file_operations import FileOperations, write_file
from mds_ckpt.naming import Named, megatron_order, stored_block_name, stored_module_name
from mds_ckpt.plan import Loss, Options, Plan, target_dtype
from mds_ckpt.reshard import divide_layers
from mds_ckpt.target_args import Progress, check_expressible, qkv_layout_of, stored_args
from mds_ckpt.target_layout import (
    LocalTensor,
    TargetLayout,
    local_shard,
    padded_vocabulary,
    target_facts,
    true_vocabulary,
)
from mds_ckpt.torch_writer import ordered, save_torch_file

__all__ = ["plan"]

TRACKER = "latest_checkpointed_iteration.txt"
WORDS = "embedding.word_embeddings.weight"
_MOMENTS = ("exp_avg", "exp_avg_sq")


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
        check_expressible(checkpoint)
        self._checkpoint = checkpoint
        self._options = options
        self._layout = layout
        self._is_release = is_release
        self._progress = Progress(checkpoint, is_release=is_release)
        self._words = true_vocabulary(checkpoint, options.vocab_size)
        self._rows = padded_vocabulary(checkpoint, layout, self._words)
        self._qkv = qkv_layout_of(checkpoint)
        self._facts = target_facts(checkpoint, layout, words=self._words, qkv=self._qkv)
        self._stack = "decoder" if checkpoint.model.family == "gpt" else "encoder"
        self._losses: list[Loss] = []
        is_weights_only = options.weights_only or is_release
        self._states = ["weight"] if is_weights_only else self._complete_states()
        if layout.pp_size > 1 and checkpoint.model.family == "t5":
            raise UnsupportedError(
                checkpoint.path, "a T5 model is written to one stage only", remedy="leave --pp out"
            )

    def _complete_states(self) -> list[str]:
        names = self._checkpoint.tensors.keys()
        wanted = ("weight", "master", *_MOMENTS)
        found = [s for s in wanted if self._checkpoint.states.get(s, {}).keys() == names]
        return found if set(_MOMENTS) <= set(found) else ["weight"]

    def plan(self) -> Plan:
        files = list(self._files())
        states = self._checkpoint.states
        return Plan(
            used=[(state, name) for state in self._states for name in states[state]],
            dropped={
                (state, name): "only weights are written"
                if self._states == ["weight"]
                else "Megatron's files do not hold it"
                for state, tensors in states.items()
                if state not in self._states
                for name in tensors
            },
            num_targets=sum(len(list(_tensors(value))) for _, value in files),
            nbytes=sum(t.nbytes for _, value in files for t in _tensors(value)) + (1 << 16),
            write=lambda folder, operations: self._write(folder, files, operations),
            notes=self._notes(),
        )

    def _notes(self) -> list[str]:
        layout = self._layout
        notes = [
            f"query, key and value rows are written {self._qkv}, as the source's own code has them",
            f"written for tp {layout.tp_size}, pp {layout.pp_size}",
        ]
        if self._rows != self._words:
            notes.append(f"{self._words} words are padded to {self._rows} rows with zeros")
        return notes

    def _write(
        self, folder: Path, files: Sequence[tuple[str, Any]], operations: FileOperations
    ) -> Sequence[Loss]:
        self._losses.clear()
        name = "release" if self._is_release else f"iter_{self._progress.iteration:07d}"
        operations.make_folder(folder / name)
        for rank, value in files:
            operations.make_folder(folder / name / rank)
            save_torch_file(
                folder / name / rank / "model_optim_rng.pt", value, operations=operations
            )
            operations.sync_folder(folder / name / rank)
        operations.sync_folder(folder / name)
        text = "release" if self._is_release else str(self._progress.iteration)
        write_file(folder / TRACKER, text.encode(), operations=operations)
        return _merged(self._losses)

    def _files(self) -> Iterator[tuple[str, dict[str, Any]]]:
        layers = self._checkpoint.config["num_layers"]
        try:
            stages = divide_layers(layers, self._layout.pp_size)
        except ValueError as error:
            raise UnsupportedError(
                self._checkpoint.path, str(error), remedy="choose another --pp"
            ) from None
        for number, stage in enumerate(stages):
            for rank in range(self._layout.tp_size):
                name = f"mp_rank_{rank:02d}" + (f"_{number:03d}" if len(stages) > 1 else "")
                yield name, self._state(number, stage, rank)

    def _state(self, number: int, stage: range, rank: int) -> dict[str, Any]:
        names = list(self._stage_names(number, stage))
        state: dict[str, Any] = {
            "args": self._args(),
            "checkpoint_version": 3.0,
            "iteration": self._progress.iteration,
            "tokens": self._progress.tokens,
            "universal_checkpoint_info": {
                "universal_checkpoint_version": 0.2,
                "original_vocab_size": self._words,
                "padded_vocab_size": self._rows,
            },
            "model": self._model(names, rank),
        }
        schedule = self._checkpoint.training.get("schedule")
        if len(self._states) > 1:
            state["optimizer"] = self._optimizer(names, rank)
            state["opt_param_scheduler"] = dict(schedule) if schedule else None
        return state

    def _args(self) -> Any:
        return stored_args(
            self._checkpoint,
            self._layout,
            self._progress,
            padded_rows=self._rows,
            dtype=self._dtype(),
            qkv=self._qkv,
        )

    def _dtype(self) -> str:
        words = self._checkpoint.tensor(WORDS)
        return target_dtype(words.dtype, self._options.dtype)

    def _stage_names(self, number: int, stage: range) -> Iterator[tuple[str, str, Named]]:
        """Canonical name, stored name and sharing of what a stage holds, in Megatron's order."""
        is_last = number == self._layout.pp_size - 1
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
                raise self._unknown(name)
            place = f"language_model.{self._kind(parts[0])}.layers.{number - stage.start}"
            return f"{place}.{block[0]}", Named(name, block[1].sharing)
        if parts[1] == "final_layernorm":
            stored = f"language_model.{self._kind(parts[0])}.final_layernorm.{parts[2]}"
            return (stored, Named(name, "replicated")) if is_last else None
        module = stored_module_name(name)
        if module is None:
            raise self._unknown(name)
        return module if (is_first if name.startswith("embedding.") else is_last) else None

    def _kind(self, stack: str) -> str:
        return "encoder" if stack == self._stack else stack

    def _unknown(self, name: str) -> UnsupportedError:
        return UnsupportedError(
            self._checkpoint.path,
            "Megatron has no such parameter",
            remedy="convert to another format",
            tensor=name,
        )

    def _local(self, named: Named, rank: int, state: str) -> LocalTensor:
        tensor: LazyTensor = self._checkpoint.states[state][named.name]
        shard = local_shard(self._checkpoint, named, tensor, rank, self._facts, self._rows)
        dtype = tensor.dtype
        if state == "weight":
            dtype = target_dtype(dtype, self._options.dtype)
        return LocalTensor(tensor, shard, dtype, self._losses)

    def _model(self, names: Sequence[tuple[str, str, Named]], rank: int) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for _, stored, named in names:
            _insert(tree, stored, self._local(named, rank, "weight"))
        return _ordered_tree(tree)

    def _optimizer(self, names: Sequence[tuple[str, str, Named]], rank: int) -> dict[str, Any]:
        """By number, decayed parameters first; fp32 masters beside where the weights are half."""
        groups = _decay_groups(names, self._checkpoint.tensors)
        numbers = iter(range(len(names)))
        ids = [[next(numbers) for _ in group] for group in groups]
        recorded = self._checkpoint.training.get("optimizer") or {}
        state = {
            number: {
                "step": int(recorded.get("step") or 0),
                **{moment: self._local(named, rank, moment) for moment in _MOMENTS},
            }
            for group, members in zip(ids, groups, strict=True)
            for number, named in zip(group, members, strict=True)
        }
        stored = recorded.get("groups") or [{}, {}]
        param_groups = [
            {**_hyperparameters(stored, index), "params": group} for index, group in enumerate(ids)
        ]
        inner = {"state": state, "param_groups": param_groups}
        if "master" not in self._states:
            return inner
        masters = [[self._local(named, rank, "master") for named in group] for group in groups]
        return {"optimizer": inner, "fp32_from_fp16_params": masters}


def _hyperparameters(stored: Sequence[Mapping[str, Any]], index: int) -> dict[str, Any]:
    known = dict(stored[index]) if index < len(stored) else {}
    known.pop("parameters", None)
    multiple = 0.0 if index else 1.0
    return {"wd_mult": multiple, "lr_mult": 1.0, **known}


def _decay_groups(
    names: Sequence[tuple[str, str, Named]], tensors: Mapping[str, LazyTensor]
) -> list[list[Named]]:
    plain = [
        named for name, _, named in names if name.endswith(".bias") or len(tensors[name].shape) == 1
    ]
    decayed = [named for _, _, named in names if named not in plain]
    return [group for group in (decayed, plain) if group]


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


def _tensors(value: Any) -> Iterator[LocalTensor]:
    if isinstance(value, LocalTensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "items") and isinstance(value.items, list):
        yield from _tensors([item for _, item in value.items])


def _merged(losses: Sequence[Loss]) -> list[Loss]:
    """One loss a tensor: ranks each report their own part."""
    found: dict[str, Loss] = {}
    for loss in losses:
        before = found.get(loss.tensor, Loss(loss.tensor, 0, 0))
        infinite, zero = before.infinite + loss.infinite, before.zero + loss.zero
        found[loss.tensor] = Loss(loss.tensor, infinite, zero)
    return list(found.values())
