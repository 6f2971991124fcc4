"""What all rank-wise targets share: the ranks' tensors, the states that are written, counts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mds_ckpt.checkpoint import Checkpoint, LazyTensor
from mds_ckpt.errors import UnsupportedError
from mds_ckpt.megatron.naming import Named, expert_of, megatron_order
from mds_ckpt.megatron.random_state import RandomState
from mds_ckpt.megatron.reshard import Shard, divide_layers
from mds_ckpt.megatron.target_args import (
    Progress,
    check_expressible,
    qkv_layout_of,
    source_args,
    stored_args,
)
from mds_ckpt.megatron.target_groups import ParameterGroup, settings_of
from mds_ckpt.megatron.target_layout import (
    LocalTensor,
    TargetLayout,
    local_shard,
    padded_vocabulary,
    target_facts,
    true_vocabulary,
)
from mds_ckpt.pickles.records import Global, Namespace, Opaque, TorchDtype
from mds_ckpt.plan import Loss, Options, target_dtype
from mds_ckpt.tensors.dtype import ITEM_SIZES

__all__ = ["MOMENTS", "WORDS", "RankedTarget", "local_tensors", "merged_losses"]

_STATIC = "deepspeed.runtime.fp16.loss_scaler.LossScaler"
_DYNAMIC: Mapping[str, Any] = MappingProxyType(
    {
        "class": "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "cur_scale": 65536.0,
        "dynamic": True,
        "cur_iter": 0,
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": 1000,
        "min_scale": 1,
        "delayed_shift": 2,
        "cur_hysteresis": 2,
        "consecutive_hysteresis": False,
        "raise_error_at_min_scale": True,
        "dtype": TorchDtype("float16"),
    }
)
"""What DeepSpeed's dynamic scaler begins with."""
WORDS = "embedding.word_embeddings.weight"
MOMENTS = ("exp_avg", "exp_avg_sq")


class RankedTarget:
    """A checkpoint that is to be cut by ranks.

    Args:
        checkpoint: The source.
        options: What the user asked.
        layout: Degrees of the target.

    Raises:
        UnsupportedError: Megatron has no words for the model, or the layout does not fit it.
    """

    def __init__(self, checkpoint: Checkpoint, options: Options, layout: TargetLayout) -> None:
        self.checkpoint = checkpoint
        self.layout = layout
        self.experts = self._experts()
        check_expressible(checkpoint, self.experts)
        self.progress = Progress(checkpoint)
        self.words = true_vocabulary(checkpoint, options.vocab_size)
        self.rows = padded_vocabulary(checkpoint, layout, self.words)
        self.qkv = qkv_layout_of(checkpoint)
        # Embeddings or norms may be in fp32 where the run is not.
        self._source_dtype = _main_dtype(checkpoint.tensors.values())
        self.losses: list[Loss] = []
        self._shards: dict[tuple[Named, int, tuple[int, ...]], Shard] = {}
        self._holds_masters = True
        self._options = options
        self._facts = target_facts(checkpoint, layout, words=self.words, qkv=self.qkv)
        self.states = ["weight"] if options.weights_only else self._complete_states()
        self.stages = self._stages()

    def _complete_states(self) -> list[str]:
        """The weights, and the optimizer's states if they are there for every parameter."""
        names = self.checkpoint.tensors.keys()
        wanted = ("weight", "master", *MOMENTS)
        found = [s for s in wanted if self.checkpoint.states.get(s, {}).keys() == names]
        return found if set(MOMENTS) <= set(found) else ["weight"]

    def _stages(self) -> list[range]:
        layout, count = self.layout, self.checkpoint.config["num_layers"]
        try:
            return divide_layers(count, layout.pp_size, sizes=layout.layers_per_stage)
        except ValueError as error:
            remedy = "choose another --pp, or other --layers-per-stage"
            raise UnsupportedError(self.checkpoint.path, str(error), remedy=remedy) from None

    def _experts(self) -> dict[str, int]:
        """The number of experts of each layer that has some, by the layer's name."""
        found: dict[str, int] = {}
        for name in sorted(self.checkpoint.tensors, key=megatron_order):
            if (number := expert_of(name)) is not None:
                layer = name.split(".mlp.experts.")[0]
                found[layer] = max(found.get(layer, 0), number + 1)
        for layer, count in found.items():
            if count % self.layout.ep_size:
                raise UnsupportedError(
                    self.checkpoint.path,
                    f"{count} experts of {layer} can't be shared out among --ep "
                    f"{self.layout.ep_size} ranks",
                    remedy="choose another --ep",
                )
        if self.layout.ep_size > 1 and not found:
            raise UnsupportedError(
                self.checkpoint.path, "it has no experts to share out", remedy="leave --ep away"
            )
        return found

    def shared(self, named: Named) -> Named:
        """How ranks share a parameter: each holds whole experts, unless the run split them."""
        is_expert = ".mlp.experts." in named.name or ".mlp.shared_experts." in named.name
        return replace(named, sharing="replicated") if is_expert and not self._splits else named

    @property
    def _splits(self) -> bool:
        source = source_args(self.checkpoint)
        return source.get("enable_expert_tensor_parallelism") is True

    @property
    def dtype(self) -> str:
        """The number type of the written weights, or of most of them."""
        return target_dtype(self._source_dtype, self._options.dtype)

    @property
    def has_optimizer(self) -> bool:
        """Whether more than weights is written."""
        return len(self.states) > 1

    @property
    def has_masters(self) -> bool:
        """Whether there are fp32 copies of narrower weights."""
        return "master" in self.states

    @property
    def _takes_masters(self) -> bool:
        """Whether narrower weights are written in fp32, so that the masters are the weights."""
        is_wider = self.dtype == "F32" and self._source_dtype != "F32"
        return self.has_masters and is_wider

    def leave_masters(self) -> None:
        """Write no masters beside weights that are in fp32 themselves."""
        self._holds_masters = self.dtype != "F32"

    def _left_out(self) -> dict[str, str]:
        """States of complete ones that are not written, and why."""
        if self._takes_masters:
            return {"weight": "the fp32 masters are written in their place"}
        if self.has_masters and not self._holds_masters:
            return {"master": "the weights are in fp32 themselves"}
        return {}

    def used(self) -> list[tuple[str, str]]:
        """Every source tensor that is written."""
        states = [state for state in self.states if state not in self._left_out()]
        return [(state, name) for state in states for name in self.checkpoint.states[state]]

    def dropped(self) -> dict[tuple[str, str], str]:
        """Every source tensor that is not, and why."""
        reason = "the format does not hold it" if self.has_optimizer else "only weights are written"
        reasons = {s: reason for s in self.checkpoint.states if s not in self.states}
        reasons |= self._left_out()
        return {(s, name): why for s, why in reasons.items() for name in self.checkpoint.states[s]}

    def notes(self) -> list[str]:
        """What was chosen, as sentences."""
        notes = [
            f"query, key and value rows are written {self.qkv}, as the source's own code has them",
            f"written for tp {self.layout.tp_size}, pp {self.layout.pp_size}",
            self._random_note(),
        ]
        if self.rows != self.words:
            notes.append(f"{self.words} words are padded to {self.rows} rows with zeros")
        return notes

    def _random_states(self) -> Mapping[tuple[int, int], RandomState]:
        """The source's states of random generators, if its ranks are the target's."""
        found: Mapping[tuple[int, int], RandomState] = self.checkpoint.carried.get("rng") or {}
        ranks = itertools.product(range(self.layout.tp_size), range(self.layout.pp_size))
        return found if found.keys() == set(ranks) else {}

    def _random_note(self) -> str:
        if self._random_states():
            return "the states of random generators are carried, rank by rank"
        return "the state of random generators is not written; load with --no-load-rng"

    def random_state(self, tp_rank: int, stage: int) -> dict[str, Any]:
        """``rng_state`` of a rank's file; empty where it is not known."""
        found = self._random_states().get((tp_rank, stage))
        return {} if found is None else {"rng_state": found.value()}

    def args(self) -> Namespace:
        """The argument namespace."""
        return stored_args(
            self.checkpoint,
            self.layout,
            self.progress,
            padded_rows=self.rows,
            dtype=self.dtype,
            qkv=self.qkv,
            experts=self.experts,
        )

    def local(self, named: Named, rank: int, state: str) -> LocalTensor:
        """What tensor-parallel rank ``rank`` holds of one state of a parameter.

        Masters are there for every run: where the source has none, they are its weights.
        """
        if state in ("weight", "master"):
            is_master = self._takes_masters if state == "weight" else self.has_masters
            source = "master" if is_master else "weight"
        else:
            source = state
        tensor: LazyTensor = self.checkpoint.states[source][named.name]
        # Asked again for each state and each rank's share of it, and always the same.
        if (key := (named, rank, tensor.shape)) not in self._shards:
            facts = self._facts
            self._shards[key] = local_shard(self.checkpoint, named, tensor, rank, facts, self.rows)
        shard = self._shards[key]
        dtype = tensor.dtype
        if state == "weight":
            dtype = target_dtype(dtype, self._options.dtype)
        elif state == "master":
            dtype = "F32"
        return LocalTensor(tensor, shard, dtype, self.losses)

    def unknown(self, name: str) -> UnsupportedError:
        """The error for a parameter that the target has no name for."""
        return UnsupportedError(
            self.checkpoint.path,
            "Megatron has no such parameter",
            remedy="convert to another format",
            tensor=name,
        )

    def settings(self, group: ParameterGroup) -> dict[str, Any]:
        """What a group of the optimizer is set to; the schedule sets the learning rate itself."""
        recorded = self.checkpoint.training.get("optimizer") or {}
        return settings_of(
            group,
            recorded.get("groups") or [],
            self.args().fields,
            ep_size=self.layout.ep_size,
        )

    def clipping(self) -> dict[str, float]:
        """``clip_grad`` as the source has it; nothing where it is unknown."""
        value = self.checkpoint.carried.get("clip_grad")
        if value is None:
            value = source_args(self.checkpoint).get("clip_grad")
        if not isinstance(value, int | float) or value is True:
            return {}  # DeepSpeed then keeps what its own configuration says
        return {"clip_grad": float(value)}

    def loss_scale(self) -> dict[str, Any]:
        """The loss scaler's class and state: the source's in fp16, a constant 1 in other types."""
        if self.dtype != "F16":
            return {"class": _STATIC, "cur_scale": 1.0, "dynamic": False}
        recorded = (self.checkpoint.training.get("optimizer") or {}).get("loss_scaler")
        is_half = self.checkpoint.tensor(WORDS).dtype == "F16"
        known = dict(recorded) if isinstance(recorded, Mapping) and is_half else {}
        if known and not str(known.get("class")).endswith("DynamicLossScaler"):
            return {**known, "class": _STATIC}
        known.pop("dtype", None)
        return {**_DYNAMIC, **known}

    def loss_scaler(self) -> Opaque:
        """The loss scaler as DeepSpeed's ZeRO files have it."""
        state = self.loss_scale()
        module, _, name = str(state.pop("class")).rpartition(".")
        return Opaque(Global(module, name), state=state)

    @property
    def optimizer_step(self) -> int:
        """The optimizer's own count of steps."""
        recorded = self.checkpoint.training.get("optimizer") or {}
        step = recorded.get("step")
        return step if type(step) is int else self.progress.iteration


def _main_dtype(tensors: Iterable[LazyTensor]) -> str:
    """The number type of most of the elements."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.dtype] += tensor.nbytes // ITEM_SIZES[tensor.dtype]
    return counts.most_common(1)[0][0]


def local_tensors(value: Any) -> Iterator[LocalTensor]:
    """Every promised tensor inside nested containers and records."""
    if isinstance(value, LocalTensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from local_tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from local_tensors(item)
    elif hasattr(value, "items") and isinstance(value.items, list):
        yield from local_tensors([item for _, item in value.items])


def merged_losses(losses: Sequence[Loss]) -> list[Loss]:
    """One loss a tensor: ranks each report their own part."""
    found: dict[str, Loss] = {}
    for loss in losses:
        before = found.get(loss.tensor, Loss(loss.tensor, 0, 0))
        infinite, zero = before.infinite + loss.infinite, before.zero + loss.zero
        found[loss.tensor] = Loss(loss.tensor, infinite, zero)
    return list(found.values())
