"""What all rank-wise targets share: the ranks' tensors, the states that are written, counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mds_ckpt.checkpoint import Checkpoint, LazyTensor
from mds_ckpt.errors import UnsupportedError
from mds_ckpt.megatron.naming import Named
from mds_ckpt.megatron.reshard import divide_layers
from mds_ckpt.megatron.target_args import Progress, check_expressible, qkv_layout_of, stored_args
from mds_ckpt.megatron.target_layout import (
    LocalTensor,
    TargetLayout,
    local_shard,
    padded_vocabulary,
    target_facts,
    true_vocabulary,
)
from mds_ckpt.pickles.records import Global, Namespace, Opaque
from mds_ckpt.plan import Loss, Options, target_dtype

__all__ = ["MOMENTS", "WORDS", "RankedTarget", "decay_groups", "local_tensors", "merged_losses"]

WORDS = "embedding.word_embeddings.weight"
MOMENTS = ("exp_avg", "exp_avg_sq")


class RankedTarget:
    """A checkpoint that is to be cut by ranks.

    Args:
        checkpoint: The source.
        options: What the user asked.
        layout: Degrees of the target.
        is_release: Whether the weights are to be trained from anew.

    Raises:
        UnsupportedError: Megatron has no words for the model, or the layout does not fit it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: Options,
        layout: TargetLayout,
        *,
        is_release: bool = False,
    ) -> None:
        check_expressible(checkpoint)
        self.checkpoint = checkpoint
        self.layout = layout
        self.progress = Progress(checkpoint, is_release=is_release)
        self.words = true_vocabulary(checkpoint, options.vocab_size)
        self.rows = padded_vocabulary(checkpoint, layout, self.words)
        self.qkv = qkv_layout_of(checkpoint)
        self.losses: list[Loss] = []
        self._options = options
        self._facts = target_facts(checkpoint, layout, words=self.words, qkv=self.qkv)
        is_weights_only = options.weights_only or is_release
        self.states = ["weight"] if is_weights_only else self._complete_states()
        self.stages = self._stages()

    def _complete_states(self) -> list[str]:
        """The weights, and the optimizer's states if they are there for every parameter."""
        names = self.checkpoint.tensors.keys()
        wanted = ("weight", "master", *MOMENTS)
        found = [s for s in wanted if self.checkpoint.states.get(s, {}).keys() == names]
        return found if set(MOMENTS) <= set(found) else ["weight"]

    def _stages(self) -> list[range]:
        try:
            return divide_layers(self.checkpoint.config["num_layers"], self.layout.pp_size)
        except ValueError as error:
            raise UnsupportedError(
                self.checkpoint.path, str(error), remedy="choose another --pp"
            ) from None

    @property
    def dtype(self) -> str:
        """The number type of the written weights."""
        return target_dtype(self.checkpoint.tensor(WORDS).dtype, self._options.dtype)

    @property
    def has_optimizer(self) -> bool:
        """Whether more than weights is written."""
        return len(self.states) > 1

    def used(self) -> list[tuple[str, str]]:
        """Every source tensor that is written."""
        return [(state, n) for state in self.states for n in self.checkpoint.states[state]]

    def dropped(self) -> dict[tuple[str, str], str]:
        """Every source tensor that is not, and why."""
        reason = "the format does not hold it" if self.has_optimizer else "only weights are written"
        return {
            (state, name): reason
            for state, tensors in self.checkpoint.states.items()
            if state not in self.states
            for name in tensors
        }

    def notes(self) -> list[str]:
        """What was chosen, as sentences."""
        notes = [
            f"query, key and value rows are written {self.qkv}, as the source's own code has them",
            f"written for tp {self.layout.tp_size}, pp {self.layout.pp_size}",
            "the state of random generators is not written; load with --no-load-rng",
        ]
        if self.rows != self.words:
            notes.append(f"{self.words} words are padded to {self.rows} rows with zeros")
        return notes

    def args(self) -> Namespace:
        """The argument namespace."""
        return stored_args(
            self.checkpoint,
            self.layout,
            self.progress,
            padded_rows=self.rows,
            dtype=self.dtype,
            qkv=self.qkv,
        )

    def local(self, named: Named, rank: int, state: str) -> LocalTensor:
        """What tensor-parallel rank ``rank`` holds of one state of a parameter."""
        tensor: LazyTensor = self.checkpoint.states[state][named.name]
        shard = local_shard(self.checkpoint, named, tensor, rank, self._facts, self.rows)
        dtype = tensor.dtype
        if state == "weight":
            dtype = target_dtype(dtype, self._options.dtype)
        return LocalTensor(tensor, shard, dtype, self.losses)

    def unknown(self, name: str) -> UnsupportedError:
        """The error for a parameter that the target has no name for."""
        return UnsupportedError(
            self.checkpoint.path,
            "Megatron has no such parameter",
            remedy="convert to another format",
            tensor=name,
        )

    def hyperparameters(self, index: int) -> dict[str, Any]:
        """What the source's optimizer group ``index`` was set to; 0 decays, 1 does not."""
        recorded = self.checkpoint.training.get("optimizer") or {}
        groups = recorded.get("groups") or []
        known = dict(groups[index]) if index < len(groups) else {}
        known.pop("parameters", None)
        if isinstance(known.get("betas"), list):
            known["betas"] = tuple(known["betas"])
        return {**self._default_hyperparameters(index), **known}

    def _default_hyperparameters(self, index: int) -> dict[str, Any]:
        """What torch's Adam must find in a group; the schedule sets the learning rate itself."""
        args = self.args().fields
        betas = (args.get("adam_beta1", 0.9), args.get("adam_beta2", 0.999))
        return {
            "wd_mult": 0.0 if index else 1.0,
            "lr_mult": 1.0,
            "lr": args.get("lr") or 0.0,
            "betas": betas,
            "eps": args.get("adam_eps", 1e-8),
            "weight_decay": 0.0 if index else args.get("weight_decay", 0.01),
        }

    def loss_scaler(self) -> Opaque:
        """DeepSpeed's loss scaler: the source's, or a constant 1."""
        recorded = (self.checkpoint.training.get("optimizer") or {}).get("loss_scaler")
        state = dict(recorded) if isinstance(recorded, Mapping) else {}
        is_dynamic = str(state.pop("class", "")).endswith("DynamicLossScaler")
        name = "DynamicLossScaler" if is_dynamic else "LossScaler"
        cls = Global("deepspeed.runtime.fp16.loss_scaler", name)
        return Opaque(cls, state=state or {"cur_scale": 1.0, "dynamic": False})

    @property
    def optimizer_step(self) -> int:
        """The optimizer's own count of steps."""
        recorded = self.checkpoint.training.get("optimizer") or {}
        step = recorded.get("step")
        return step if type(step) is int else self.progress.iteration


def decay_groups(names: Sequence[Named], tensors: Mapping[str, LazyTensor]) -> list[list[Named]]:
    """Megatron's parameter groups: with weight decay, without (biases and all that is 1-D)."""
    plain = [n for n in names if n.name.endswith(".bias") or len(tensors[n.name].shape) == 1]
    return [[named for named in names if named not in plain], plain]


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
