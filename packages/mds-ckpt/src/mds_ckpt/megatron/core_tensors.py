"""What Megatron-core stores of a model, and under which names: the counterpart of its reader.

Layers that are alike are stacked: one tensor for all of them, the layer is its first dimension, and
every layer is a chunk of it. Experts are stacked behind the layer. Where layers differ, as when
only some have experts, each is stored under its number.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mds_ckpt.checkpoint import Checkpoint, LazyTensor
from mds_ckpt.errors import UnsupportedError
from mds_ckpt.megatron.reshard import Shard
from mds_ckpt.megatron.target_layout import LocalTensor
from mds_ckpt.plan import Loss, target_dtype

__all__ = ["CoreTensors", "StoredTensor"]

_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_FUSED: Mapping[str, str] = MappingProxyType(
    {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
)
"""Where Transformer Engine keeps the norms, under whose names they are stored."""
_LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj")
_ATTENTION = (*_LINEARS, "self_attention.core_attention")
_MLP = ("mlp.linear_fc1", "mlp.linear_fc2")
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the target: its name, and a chunk for each place of its leading dimensions."""

    name: str
    chunks: tuple[LocalTensor, ...]
    counts: tuple[int, ...] = ()
    """Extents of the dimensions that count layers and experts."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole shape."""
        return (*self.counts, *self.chunks[0].shape[len(self.counts) :])

    def placed(self) -> Iterator[tuple[tuple[int, ...], LocalTensor]]:
        """The chunks with where each begins."""
        behind = (0,) * (len(self.shape) - len(self.counts))
        places = itertools.product(*(range(count) for count in self.counts))
        for place, chunk in zip(places, self.chunks, strict=True):
            yield (*place, *behind), chunk


class _Chunk(LocalTensor):
    """A whole tensor, with dimensions of extent 1 in front of its own."""

    def __init__(self, tensor: LazyTensor, dtype: str, losses: list[Loss], *, axes: int) -> None:
        super().__init__(tensor, Shard(tensor.shape, tensor.shape, None), dtype, losses)
        self.shape = (*[1] * axes, *tensor.shape)


class CoreTensors:
    """A model's weights as Megatron-core stores them.

    Args:
        checkpoint: The source.
        dtype: Type of the weights; each keeps its own if None.
        words: The true vocabulary.
        rows: Rows of the padded one.
        losses: Where casts tell what they lost.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: str | None,
        words: int,
        rows: int,
        losses: list[Loss],
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._words, self._rows = words, rows
        self._losses = losses
        self._layers: dict[int, dict[str, LazyTensor]] = {}
        self._outside: dict[str, LazyTensor] = {}
        self._stack = "decoder"
        for name, tensor in checkpoint.tensors.items():
            if (layer := _LAYER.fullmatch(name)) is not None:
                self._stack = layer[1]
                self._layers.setdefault(int(layer[2]), {})[layer[3]] = tensor
            else:
                self._outside[name] = tensor
        kinds = {frozenset(_described(layer)) for layer in self._layers.values()}
        self._is_stacked = len(kinds) == 1
        if len(self._layers) != checkpoint.config["num_layers"]:
            raise self._refused("layers are missing", f"{self._stack}.layers")

    def tensors(self) -> Iterator[StoredTensor]:
        """Everything that is stored."""
        for name, tensor in self._outside.items():
            yield StoredTensor(name, (self._whole(name, tensor),))
        if self._is_stacked:
            layers = [self._layers[number] for number in sorted(self._layers)]
            for rest, counts in _grid(layers[0]).items():
                yield self._stored(f"{self._stack}.layers.", rest, layers, (len(layers), *counts))
            return
        for number, layer in sorted(self._layers.items()):
            for rest, counts in _grid(layer).items():
                yield self._stored(f"{self._stack}.layers.{number}.", rest, [layer], counts)

    def _whole(self, name: str, tensor: LazyTensor) -> LocalTensor:
        dtype, shape = target_dtype(tensor.dtype, self._dtype), tensor.shape
        if name not in _VOCABULARY:
            return LocalTensor(tensor, Shard(shape, shape, None), dtype, self._losses)
        local = (self._rows, *shape[1:])
        return LocalTensor(tensor, Shard(shape, local, 0, ((0, self._words),)), dtype, self._losses)

    def _stored(
        self,
        prefix: str,
        rest: str,
        layers: Sequence[Mapping[str, LazyTensor]],
        counts: tuple[int, ...],
    ) -> StoredTensor:
        has_experts = "{expert}" in rest
        numbers = range(counts[-1]) if has_experts else range(1)
        held = [layer[rest.format(expert=number)] for layer in layers for number in numbers]
        if len({(tensor.shape, tensor.dtype) for tensor in held}) != 1:
            raise self._refused("its layers are not alike, so they can't be stacked", held[0].name)
        chunks = tuple(
            _Chunk(tensor, target_dtype(tensor.dtype, self._dtype), self._losses, axes=len(counts))
            for tensor in held
        )
        return StoredTensor(prefix + _stored_name(rest, layers[0]), chunks, counts)

    def _refused(self, reason: str, name: str) -> UnsupportedError:
        return UnsupportedError(
            self._checkpoint.path, reason, remedy="convert it to mds", tensor=name
        )

    def objects(self) -> list[str]:
        """Objects without content that Megatron-core asks for when it loads."""
        found = []
        total = len(self._layers)
        for number, layer in sorted(self._layers.items()):
            prefix, place, of = f"{self._stack}.layers.", [number], [total]
            if not self._is_stacked:
                prefix, place, of = f"{prefix}{number}.", [], []
            experts = _experts(layer)
            modules = [*_ATTENTION, *(() if experts else _MLP)]
            if any(name.startswith("mlp.shared_experts.") for name in layer):
                modules += ["mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"]
            found += [f"{prefix}{module}._extra_state/{_shard(place, of)}" for module in modules]
            found += [
                f"{prefix}mlp.experts.experts.{linear}._extra_state/"
                f"{_shard([*place, expert], [*of, experts])}"
                for expert in range(experts)
                for linear in ("linear_fc1", "linear_fc2")
            ]
        return found


def _shard(place: Sequence[int], counts: Sequence[int]) -> str:
    """How Megatron-core names a part of an object that is cut along some dimensions."""
    offsets, extents = list(place) or [0], list(counts) or [1]
    return f"shard_{'.'.join(map(str, offsets))}_{'.'.join(map(str, extents))}"


def _experts(layer: Mapping[str, LazyTensor]) -> int:
    numbers = [int(m[1]) for name in layer if (m := _EXPERT.fullmatch(name)) is not None]
    return 1 + max(numbers, default=-1)


def _grid(layer: Mapping[str, LazyTensor]) -> dict[str, tuple[int, ...]]:
    """A layer's tensors, experts put together as ``{expert}``, and how many there are of each."""
    experts = _experts(layer)
    found: dict[str, tuple[int, ...]] = {}
    for name in layer:
        if (match := _EXPERT.fullmatch(name)) is not None:
            found[f"mlp.experts.local_experts.{{expert}}.{match[2]}"] = (experts,)
        else:
            found[name] = ()
    return found


def _described(layer: Mapping[str, LazyTensor]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tensor.shape) for name, tensor in layer.items()]


def _stored_name(rest: str, layer: Mapping[str, LazyTensor]) -> str:
    """Megatron-core's name of a tensor; before experts Transformer Engine keeps the norm apart."""
    rest = rest.replace("mlp.experts.local_experts.{expert}.", "mlp.experts.experts.")
    for norm, fused in _FUSED.items():
        if rest.startswith(norm) and not (norm.startswith("pre_mlp") and _experts(layer)):
            return fused + rest.removeprefix(norm)
    return rest
