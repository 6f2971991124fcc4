"""What a Megatron or DeepSpeed checkpoint says of its model and run, in our terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mds_ckpt.checkpoint import Checkpoint, LazyTensor
from mds_ckpt.errors import RejectedError
from mds_ckpt.manifest import ModelRecord
from mds_ckpt.megatron.deepspeed_folder import Listing, step_of
from mds_ckpt.megatron.expert_args import missing_experts
from mds_ckpt.megatron.legacy_args import heads_of, is_gated, model_config, plain, weight_dtype
from mds_ckpt.megatron.naming import Named, canonical_name
from mds_ckpt.megatron.random_state import RandomState
from mds_ckpt.megatron.reshard import ModelFacts
from mds_ckpt.pickles.archive import TorchFile
from mds_ckpt.pickles.records import EnumRecord, Namespace, Opaque
from mds_ckpt.read_options import ReadOptions
from mds_ckpt.tensors.qkv import detect_layout

__all__ = ["Degrees", "ModelReading", "args_of", "known_name", "read_degrees"]

_MODEL_TYPE = "megatron.core.enums.ModelType"
"""In the arguments of every run; it says no more than whether the model has two stacks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """Degrees of parallelism of the run that wrote a checkpoint."""

    tp: int = 1
    pp: int = 1
    dp: int | None = None
    """None if nothing says."""
    ep: int = 1
    vp: int = 1

    def record(self) -> dict[str, int]:
        """The manifest's ``parallel``, without what is unknown."""
        pairs = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "ep": self.ep, "vp": self.vp}
        return {name: value for name, value in pairs.items() if value is not None}


def _count(value: Any) -> int | None:
    return value if type(value) is int and 1 <= value <= 1 << 20 else None


def args_of(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The training script's arguments; None if there are none."""
    args = state.get("args")
    if isinstance(args, Namespace):
        return args.fields
    return args if isinstance(args, dict) else None


def read_degrees(listing: Listing, state: Mapping[str, Any]) -> Degrees:
    """The degrees of a DeepSpeed folder: its files where they settle it, else the state."""
    args = args_of(state) or {}
    stored = state.get("checkpoint_parallel_dimensions")
    stored = stored if isinstance(stored, dict) else {}
    ranks = [rank for (rank,) in listing.models]
    ranks += [rank for _, rank in (*listing.stage_3_models, *listing.optimizers)]
    found = max(ranks, default=0) + 1
    tp = (
        _count(stored.get("tp_degree"))
        or _count(args.get("tensor_model_parallel_size"))
        or _count(args.get("model_parallel_size"))
    )
    if listing.layers:
        tp = max(tp or 1, max(rank for _, rank in listing.layers) + 1)
    pp = _count(stored.get("pp_degree")) or _count(args.get("pipeline_model_parallel_size"))
    world = max(_count(state.get("mp_world_size")) or 1, found)
    tp = tp or (world if pp is None else max(1, world // pp))
    if pp is None or not listing.layers or tp * pp < found:
        pp = max(1, world // tp)
    files = max((dp for dp, _ in (*listing.optimizers, *listing.stage_3_models)), default=-1) + 1
    # Without ZeRO files nothing shows that the stored degree is right, but nothing depends on it.
    dp = max(files, _count(state.get("dp_world_size")) or 0) or None
    return Degrees(tp=tp, pp=pp, dp=dp, ep=_count(args.get("moe_expert_parallel_size")) or 1)


@dataclass(eq=False, slots=True)
class ModelReading:
    """The stored facts of one checkpoint, and the notes that come up while it is read."""

    path: Path
    state: Mapping[str, Any]
    options: ReadOptions
    tp_size: int
    names: Sequence[str]
    """Stored names of the parameters, to tell the model's kind."""
    has_fpdt_names: bool = False
    dropped: frozenset[str] = frozenset()
    """Canonical names that the checkpoint holds and the model does not need."""
    notes: list[str] = field(default_factory=list)
    random: dict[tuple[int, int], RandomState] = field(default_factory=dict)
    """States of random generators by tensor-parallel rank and pipeline stage."""
    clip_grad: float | None = None
    """The norm to which gradients are clipped."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """``groups`` and ``loss_scaler``, as a reader found them."""
    args: Mapping[str, Any] = field(init=False)
    family: str = field(init=False)
    facts: ModelFacts = field(init=False)

    def __post_init__(self) -> None:
        args = args_of(self.state)
        self.args = args or {}
        self.family = _family(self.names)
        verdict = detect_layout(
            args,
            self.state.get("checkpoint_version"),
            asked=self.options.qkv_layout,
            has_fpdt_names=self.has_fpdt_names,
        )
        if self.family != "unknown":
            doubt = "" if verdict.is_certain else "; give --qkv-layout if it is not"
            self.note(f"query, key and value rows are {verdict.layout}: {verdict.reason}{doubt}")
        self.facts = ModelFacts(
            heads=heads_of(self.args),
            layout=verdict.layout,
            is_gated=is_gated(self.args),
            vocab_size=self.options.vocab_size or self._stored_vocabulary(),
            tp_size=self.tp_size,
        )

    def _stored_vocabulary(self) -> int | None:
        info = self.state.get("universal_checkpoint_info")
        stored = info.get("original_vocab_size") if isinstance(info, dict) else None
        return stored if type(stored) is int and stored > 0 else None

    @property
    def dtype(self) -> str:
        """The number type that the run computed in."""
        return weight_dtype(self.args)

    def keep_groups(self, groups: Any, scaler: Any, names: Sequence[Sequence[str]]) -> None:
        """Remember the optimizer's hyperparameters, and which parameters they are for."""
        if "groups" in self.optimizer or not isinstance(groups, list):
            return
        kept = []
        for index, group in enumerate(groups):
            if not isinstance(group, Mapping):
                return
            settings = {key: plain(value) for key, value in group.items() if key != "params"}
            mine = list(names[index]) if index < len(names) else []
            kept.append({**settings, "parameters": mine})
        self.optimizer["groups"] = kept
        if isinstance(scaler, Opaque) and isinstance(scaler.state, dict):
            self.optimizer["loss_scaler"] = {"class": str(scaler.cls), **plain(scaler.state)}

    def keep_random(self, tp_rank: int, stage: int, file: TorchFile) -> None:
        """Remember the states of random generators that a rank's file holds, if it holds any."""
        stored = file.value.get("rng_state") if isinstance(file.value, Mapping) else None
        if isinstance(stored, list) and stored:
            self.random[tp_rank, stage] = RandomState(file, stored)

    def keep_clipping(self, state: Mapping[str, Any]) -> None:
        """Remember the norm to which gradients are clipped, if an optimizer's state says it."""
        value = state.get("clip_grad")
        if isinstance(value, int | float) and value is not True and value >= 0:
            self.clip_grad = float(value)

    def _carried(self) -> dict[str, Any]:
        clipping = {} if self.clip_grad is None else {"clip_grad": self.clip_grad}
        return ({"rng": dict(self.random)} if self.random else {}) | clipping

    def note(self, sentence: str) -> None:
        """Keep a sentence for the user, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def canonical(self, name: str, *, first_layer: int = 0) -> Named | None:
        """The canonical name of a parameter outside a pipeline; its own in an unknown model."""
        if self.family == "unknown":
            return Named(name, "replicated") if self.tp_size == 1 else None
        return canonical_name(
            name,
            stack="decoder" if self.family == "gpt" else "encoder",
            first_layer=first_layer,
            has_cross_attention=self.family == "t5",
        )

    def shared(self, named: Named) -> Named:
        """How ranks share a parameter: each holds whole experts, unless the run split them."""
        is_expert = ".mlp.experts." in named.name or ".mlp.shared_experts." in named.name
        is_whole = self.args.get("enable_expert_tensor_parallelism") is not True
        return replace(named, sharing="replicated") if is_expert and is_whole else named

    def checkpoint(
        self,
        format: str,
        states: Mapping[str, Mapping[str, LazyTensor]],
        degrees: Degrees,
        *,
        zero_stage: int | None = None,
        step: int | None = None,
    ) -> Checkpoint:
        """Everything put together.

        Raises:
            RejectedError: The tensors are not those of the model that the arguments describe.
        """
        weights = states.get("weight", {})
        counters = self._counters(step)
        self._name_foreign_objects()
        parallel: dict[str, Any] = degrees.record()
        if zero_stage is not None:
            parallel["zero_stage"] = zero_stage
        return Checkpoint(
            path=self.path,
            format=format,
            model=self._model(weights),
            states=states,
            step=counters.get("iteration"),
            counters=counters,
            parallel=parallel,
            training=self._training(step),
            origin={"megatron": {"args": plain(self.args)}} if self.args else {},
            carried=self._carried(),
            notes=tuple(self.notes),
        )

    def _name_foreign_objects(self) -> None:
        foreign = {
            name: plain(value)
            for name, value in self.args.items()
            if isinstance(value, Opaque | EnumRecord) and str(value.cls) != _MODEL_TYPE
        }
        if foreign:
            listed = ", ".join(f"{name} {value}" for name, value in foreign.items())
            self.note(f"args hold objects of other code, which were not built: {listed[:1000]}")

    def _model(self, weights: Mapping[str, LazyTensor]) -> ModelRecord:
        words = weights.get("embedding.word_embeddings.weight")
        rows = words.shape[0] if words is not None else 0
        if words is not None and self.facts.vocab_size is None:
            self.note(
                f"the true vocabulary is not stored: all {rows} rows are kept; give --vocab-size "
                f"to leave padding rows out"
            )
        is_tied = "output_layer.weight" not in weights
        config = model_config(self.args, vocab_size=rows or None) if self.args else {}
        if config:
            config["tie_embeddings"] = is_tied
            config |= self._parts(weights)
            self._check_layers(weights, config.get("num_layers"))
        self._check_experts(weights)
        return ModelRecord(
            family=self.family,
            config=config,
            vocab_size=rows,
            tied_embeddings=is_tied,
        )

    def _parts(self, weights: Mapping[str, LazyTensor]) -> dict[str, Any]:
        """Fields of the configuration that the tensors tell and the arguments may not."""
        parts: dict[str, Any] = {}
        if "embedding.layernorm.weight" in weights:
            parts["embedding_norm"] = True
        if self.family == "bert":
            types = weights.get("embedding.tokentype_embeddings.weight")
            parts["num_token_types"] = 0 if types is None else types.shape[0]
            parts["word_head"] = "output_layer.bias" in weights
            parts["pooler"] = "pooler.dense.weight" in weights
            parts["binary_head"] = "binary_head.weight" in weights
            if self.args.get("bias_gelu_fusion") is True and not self.args.get("openai_gelu"):
                self.note(
                    "Megatron's word head has the exact GELU here and its layers the tanh form; a "
                    "model with one activation differs by about 1e-3"
                )
        if self.family == "t5":
            numbers = {n.split(".")[2] for n in weights if n.startswith("decoder.layers.")}
            parts["decoder_num_layers"] = len(numbers)
        return parts

    def _check_layers(self, weights: Mapping[str, LazyTensor], expected: Any) -> None:
        stack = "decoder" if self.family == "gpt" else "encoder"
        prefix = f"{stack}.layers."
        found = {int(name.split(".")[2]) for name in weights if name.startswith(prefix)}
        if found and (found != set(range(len(found))) or (expected and len(found) != expected)):
            raise RejectedError(
                self.path,
                f"it holds {len(found)} layers, up to number {max(found)}, and its arguments say "
                f"{expected}",
                remedy="copy the layers' files that are missing",
            )

    def _check_experts(self, weights: Mapping[str, LazyTensor]) -> None:
        if (missing := missing_experts(weights)) is not None:
            remedy = "copy the files of all experts here (layer_*_expert_*)"
            raise RejectedError(self.path, missing[1], remedy=remedy, tensor=missing[0])

    def _counters(self, step: int | None) -> dict[str, int]:
        state, args = self.state, self.args
        number = step_of(self.path.name)
        iterations = {
            "global_steps": state.get("global_steps"),
            "the folder's name": number,
            "iteration": state.get("iteration"),
            "args.iteration": args.get("iteration"),
        }
        samples = {
            "global_samples": state.get("global_samples"),
            "args.consumed_train_samples": args.get("consumed_train_samples"),
        }
        schedule = state.get("lr_scheduler")
        if isinstance(schedule, dict) and len(set(samples.values())) > 1:
            samples["lr_scheduler.num_steps"] = schedule.get("num_steps")
        tokens = {
            "tokens": state.get("tokens"),
            "args.consumed_train_tokens": args.get("consumed_train_tokens"),
        }
        counters = {
            "iteration": self._agreed("iteration", iterations),
            "consumed_samples": self._agreed("consumed samples", samples),
            "consumed_tokens": self._agreed("consumed tokens", tokens),
            "skipped_steps": self._agreed("skipped steps", {"": state.get("skipped_steps")}),
            "applied_updates": _applied(state, step),
        }
        return {name: value for name, value in counters.items() if value is not None}

    def _agreed(self, what: str, stored: Mapping[str, Any]) -> int | None:
        """The first stored number; a note if others differ from it."""
        known = {k: v for k, v in stored.items() if type(v) is int and 0 <= v < 1 << 62}
        if len(set(known.values())) > 1:
            listed = ", ".join(f"{name} {value}" for name, value in known.items())
            self.note(f"the stored counts of {what} disagree ({listed}); the first is taken")
        return next(iter(known.values()), None)

    def _training(self, step: int | None) -> dict[str, Any]:
        state, args = self.state, self.args
        schedule = state.get("lr_scheduler") or state.get("opt_param_scheduler")
        training: dict[str, Any] = {"config": plain(args)} if args else {}
        if isinstance(schedule, dict):
            training["schedule"] = plain(schedule)
        if type(args.get("seed")) is int:
            training["rng"] = {"seed": args["seed"], "ranks": []}
        if args:
            training["optimizer"] = {
                "name": str(args.get("optimizer") or "adam"),
                "step": step,
                "groups": [],
                "loss_scaler": None,
                **self.optimizer,
            }
        return training


def known_name(path: Path, named: Named | None, stored: str) -> Named:
    """``named``; RejectedError for a stored name that has no canonical one."""
    if named is None:
        raise RejectedError(
            path,
            "its name is not one that Megatron writes",
            remedy="tell us which code wrote it",
            tensor=stored,
        )
    return named


def _applied(state: Mapping[str, Any], step: int | None) -> int | None:
    """Updates that moved the parameters.

    DeepSpeed's optimizer for bf16 without ZeRO counts one that it makes at its construction, so
    the engine's counts come first.
    """
    taken, skipped = state.get("global_steps"), state.get("skipped_steps")
    if type(taken) is int and type(skipped) is int and 0 <= skipped <= taken:
        return taken - skipped
    return step


def _family(names: Sequence[str]) -> str:
    """``gpt``, ``bert``, ``t5``, or ``unknown`` for a model that is not Megatron's."""
    short = {name.removeprefix("module.").removeprefix("language_model.") for name in names}
    if any(".inter_attention." in name for name in short):
        return "t5"
    if any("tokentype_embeddings" in n or n.startswith(("binary_head", "pooler")) for n in short):
        return "bert"
    known = any(
        "word_embeddings" in n or ".self_attention." in n or ".attention." in n for n in short
    )
    return "gpt" if known or any("input_layernorm" in n for n in short) else "unknown"
