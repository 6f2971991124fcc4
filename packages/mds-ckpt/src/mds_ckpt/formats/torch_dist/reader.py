"""A Megatron-core checkpoint under canonical names: layers unstacked, states sorted out."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mds_ckpt.checkpoint import Checkpoint, LazyTensor, PiecedTensor, StoredPiece
from mds_ckpt.errors import RejectedError
from mds_ckpt.files.regular_file import RegularFile
from mds_ckpt.formats.torch_dist.metadata import Metadata, StoredTensor, read_metadata
from mds_ckpt.formats.torch_dist.model import describe
from mds_ckpt.formats.torch_dist.naming import key_of
from mds_ckpt.formats.torch_dist.record import RecordSource, read_object
from mds_ckpt.manifest import ModelRecord
from mds_ckpt.megatron.assemble import model_order
from mds_ckpt.megatron.expert_args import missing_experts
from mds_ckpt.megatron.legacy_args import plain
from mds_ckpt.megatron.legacy_model import args_of
from mds_ckpt.pickles.archive import open_torch_file
from mds_ckpt.read_options import ReadOptions
from mds_ckpt.tensors.box import Box, extents, size

__all__ = ["Sources", "read_torch_dist"]

MOST_LAYERS, MOST_EXPERTS, MOST_STACKED = 10_000, 100_000, 1 << 20
_STATE = re.compile(
    r"(?:chained_\d+\.)?optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param|param)\.(.+)"
)
"""Experts have an optimizer of their own, and then both are links of a chain."""
_STATES = {
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "fp32_param": "master",
    "param": "master",
}
_VOCABULARY = frozenset(
    {"embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias"}
)


@dataclass(slots=True)
class _Gathered:
    """A tensor in the making: its shape, and the pieces that were found of it."""

    shape: tuple[int, ...]
    dtype: str
    pieces: list[StoredPiece] = field(default_factory=list)
    halves: list[int | None] = field(default_factory=list)
    """The halves of a gated MLP that are there; a None for a tensor that is stored whole."""


class Sources:
    """The records of a checkpoint's tensors; each data file keeps one identity."""

    def __init__(self) -> None:
        self._files: dict[Path, RegularFile] = {}

    def of(self, tensor: StoredTensor) -> list[RecordSource]:
        """One source for each chunk of ``tensor``."""
        sources = []
        for chunk in tensor.chunks:
            path = chunk.place.path
            file = self._files.setdefault(path, RegularFile(path, cache_links=True))
            shape = extents(chunk.box)
            sources.append(RecordSource(file, chunk.place, tensor.name, shape, tensor.dtype))
        return sources


def read_torch_dist(folder: Path, options: ReadOptions | None) -> Checkpoint:
    """Open the checkpoint in ``folder``. Reads metadata and no tensor.

    Args:
        folder: The folder with ``.metadata``.
        options: What the user says; None if the checkpoint is only looked at, so that facts which
            are not stored may stay open.

    Raises:
        RejectedError: It is damaged, hostile or incomplete.
    """
    return _Reader(folder, options).checkpoint()


class _Reader:
    def __init__(self, folder: Path, options: ReadOptions | None) -> None:
        self._folder = folder
        self._options = options or ReadOptions()
        self._is_needed = options is not None
        self._metadata = read_metadata(folder)
        self._common = _common_state(folder, self._metadata)
        self._args = args_of(self._common) or {}
        self._sources = Sources()
        self._words = self._options.vocab_size or self._stored_words()
        self._notes: list[str] = []
        self._is_foreign = False

    def checkpoint(self) -> Checkpoint:
        states = self._states()
        weights = states.get("weight", {})
        model = self._model(weights)
        counters = self._counters()
        left = [name for name in self._metadata.objects if not name.startswith("common_state")]
        if left:
            self._notes.append(f"{len(left)} stored objects (extra state) are left out")
        return Checkpoint(
            path=self._folder,
            format="torch_dist",
            model=model,
            states=states,
            step=counters.get("iteration"),
            counters=counters,
            parallel=self._parallel(),
            training={"config": plain(self._args)} if self._args else {},
            origin={"megatron": {"args": plain(self._args)}} if self._args else {},
            notes=tuple(self._notes),
        )

    def _stored_words(self) -> int | None:
        """The true vocabulary, where the arguments say it of the rows that there are."""
        words, rows = self._args.get("vocab_size"), self._args.get("padded_vocab_size")
        table = self._metadata.tensors.get("embedding.word_embeddings.weight")
        if table is None or type(words) is not int or table.shape[:1] != (rows,):
            return None
        return words if 1 <= words <= table.shape[0] else None

    def _states(self) -> dict[str, dict[str, LazyTensor]]:
        """Tensors by state and canonical name; if one is foreign, all by their stored names."""
        sorted_out, dropped = self._sorted()
        foreign = [key for key, _ in sorted_out.get("weight", ()) if key_of(key) is None]
        if foreign:
            self._is_foreign = True
            self._notes.append(
                f"the tensors keep their stored names, because '{foreign[0]}' is not Megatron's"
            )
            return {"weight": {name: self._as_stored(name) for name in self._metadata.tensors}}
        if dropped:
            self._notes.append(
                f"{len(dropped)} optimizer tensors such as '{dropped[0]}' are flat buckets of "
                f"their run's layout, and are left out"
            )
        return {state: self._by_name(tensors) for state, tensors in sorted_out.items()}

    def _by_name(self, tensors: Sequence[tuple[str, StoredTensor]]) -> dict[str, LazyTensor]:
        found: dict[str, _Gathered] = {}
        for key, stored in tensors:
            for name, half, gathered in self._parts(key, stored):
                known = found.setdefault(name, _Gathered(gathered.shape, gathered.dtype))
                kind = (known.shape, known.dtype)
                if half in known.halves or (known.halves and None in (half, *known.halves)):
                    raise self._refused("it is stored twice", name)
                if kind != (gathered.shape, gathered.dtype):
                    raise self._refused("its halves differ in shape or type", name)
                known.halves.append(half)
                known.pieces.extend(gathered.pieces)
        lone = [name for name, gathered in found.items() if gathered.halves in ([0], [1])]
        if lone:
            raise self._refused("one half of it is missing", lone[0])
        return {
            name: PiecedTensor(
                name, found[name].shape, found[name].dtype, pieces=found[name].pieces
            )
            for name in sorted(found, key=model_order)
        }

    def _refused(self, reason: str, name: str) -> RejectedError:
        remedy = "copy the checkpoint again from its source"
        return RejectedError(self._folder, reason, remedy=remedy, tensor=name)

    def _sorted(self) -> tuple[dict[str, list[tuple[str, StoredTensor]]], list[str]]:
        """Stored tensors by state, with the model's own keys, and the names of flat buckets."""
        found: dict[str, list[tuple[str, StoredTensor]]] = {}
        dropped = []
        for name, tensor in self._metadata.tensors.items():
            state, key = "weight", name
            if (match := _STATE.fullmatch(name)) is not None:
                state, key = _STATES[match[1]], match[2]
            elif name.startswith(("optimizer.", "chained_")):
                dropped.append(name)
                continue
            found.setdefault(state, []).append((key.removeprefix("model."), tensor))
        return found, dropped

    def _parts(
        self, stored_name: str, stored: StoredTensor
    ) -> Iterator[tuple[str, int | None, _Gathered]]:
        """What a stored tensor holds of canonical ones: name, half of a gated MLP, and pieces."""
        key = key_of(stored_name)
        if key is None:
            raise self._refused("its optimizer state belongs to no parameter", stored_name)
        if key.name in _VOCABULARY:
            yield key.name, None, self._vocabulary(stored_name, stored)
            return
        counts = {"layer": (key.has_layers, MOST_LAYERS), "expert": (key.has_experts, MOST_EXPERTS)}
        axes = [word for word, (is_counted, _) in counts.items() if is_counted]
        if len(stored.shape) < len(axes) + (key.half is not None):
            raise self._refused(f"its shape is {list(stored.shape)}", stored_name)
        for word, extent in zip(axes, stored.shape, strict=False):
            if not 1 <= extent <= counts[word][1]:
                reason = f"a dimension of it is no number of {word}s: {extent}"
                raise self._refused(reason, stored_name)
        if math.prod(stored.shape[: len(axes)]) > MOST_STACKED:
            raise self._refused("it is said to hold more than a million tensors", stored_name)
        for place, gathered in self._unstacked(stored, len(axes), key.half).items():
            numbers = dict(zip(axes, place, strict=True))
            yield key.name.format(**numbers), key.half, gathered

    def _as_stored(self, name: str) -> LazyTensor:
        stored = self._metadata.tensors[name]
        pieces = [
            StoredPiece(chunk.box, None, source)
            for chunk, source in zip(stored.chunks, self._sources.of(stored), strict=True)
        ]
        return PiecedTensor(name, stored.shape, stored.dtype, pieces=pieces)

    def _vocabulary(self, name: str, stored: StoredTensor) -> _Gathered:
        """A tensor with a row for each word, without padding rows where the words are known."""
        shape, rows = stored.shape, self._words
        if rows is not None and shape and not 1 <= rows <= shape[0]:
            raise self._refused(f"it has {shape[0]} rows, and --vocab-size says {rows}", name)
        if rows is not None and shape:
            shape = (rows, *shape[1:])
        gathered = _Gathered(shape, stored.dtype)
        for chunk, source in zip(stored.chunks, self._sources.of(stored), strict=True):
            box = chunk.box
            if shape != stored.shape:
                box = ((box[0][0], min(box[0][1], shape[0])), *box[1:])
                if box[0][0] >= box[0][1]:
                    continue
            gathered.pieces.append(StoredPiece(box, None, source))
        return gathered

    def _unstacked(
        self, stored: StoredTensor, axes: int, half: int | None
    ) -> dict[tuple[int, ...], _Gathered]:
        """The tensors that lie one behind the other along the first ``axes`` dimensions."""
        shape = stored.shape[axes:]
        first = shape[0] * half if half is not None else 0
        whole = shape if half is None else (2 * shape[0], *shape[1:])
        counts = (range(extent) for extent in stored.shape[:axes])
        found = {place: _Gathered(whole, stored.dtype) for place in itertools.product(*counts)}
        for chunk, source in zip(stored.chunks, self._sources.of(stored), strict=True):
            inner = chunk.box[axes:]
            box = _moved(inner, first)
            held = itertools.product(*(range(*span) for span in chunk.box[:axes]))
            for number, place in enumerate(held):
                part = replace(source, offset=number * size(inner))
                found[place].pieces.append(StoredPiece(box, None, part))
        return found

    def _model(self, weights: Mapping[str, LazyTensor]) -> ModelRecord:
        words = weights.get("embedding.word_embeddings.weight")
        family = self._family(weights)
        config: Mapping[str, Any] = {}
        if family in ("gpt", "bert"):
            self._check_layers(weights)
            config, notes = describe(
                weights,
                family=family,
                args=self._args,
                said=self._options.model,
                path=self._folder,
                is_needed=self._is_needed,
            )
            self._notes.extend(notes)
        rows = words.shape[0] if words is not None and words.shape else 0
        if family != "unknown" and self._words is None:
            self._notes.append(
                f"the true vocabulary is not stored: all {rows} rows are kept; give --vocab-size "
                f"to leave padding rows out"
            )
        return ModelRecord(
            family=family,
            config=config,
            vocab_size=rows,
            tied_embeddings="output_layer.weight" not in weights,
        )

    def _family(self, weights: Mapping[str, LazyTensor]) -> str:
        words = weights.get("embedding.word_embeddings.weight")
        if self._is_foreign or words is None or len(words.shape) != 2:
            return "unknown"
        stacks = {name.partition(".layers.0.")[0] for name in weights if ".layers.0." in name}
        kinds = {("decoder",): "gpt", ("encoder",): "bert", ("decoder", "encoder"): "t5"}
        return kinds.get(tuple(sorted(stacks)), "unknown")

    def _check_layers(self, weights: Mapping[str, LazyTensor]) -> None:
        """Every layer holds the same parameters; RejectedError names the first that is missing."""
        layers: dict[int, set[str]] = {}
        stack = "decoder"
        for name in weights:
            if ".layers." in name:
                stack, _, number, rest = name.split(".", 3)
                layers.setdefault(int(number), set()).add(rest)
        everything = set().union(*layers.values())
        if (missing_one := missing_experts(weights)) is not None:
            raise self._refused(missing_one[1], missing_one[0])
        count = max(layers) + 1
        if len(layers) < count:
            gap = next(number for number in range(count) if number not in layers)
            raise self._refused("the layer is missing", f"{stack}.layers.{gap}")
        for layer, names in layers.items():
            if names != everything and not any("experts" in rest for rest in everything):
                missing = min(everything - names)
                raise self._refused("it is missing", f"{stack}.layers.{layer}.{missing}")

    def _counters(self) -> dict[str, int]:
        found = {
            "iteration": self._common.get("iteration", self._args.get("iteration")),
            "consumed_samples": self._args.get("consumed_train_samples"),
        }
        return {k: v for k, v in found.items() if type(v) is int and 0 <= v < 1 << 62}

    def _parallel(self) -> dict[str, int]:
        keys = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size"}
        found = {short: self._args.get(name) for short, name in keys.items()}
        return {k: v for k, v in found.items() if type(v) is int and 1 <= v <= 1 << 20}


def _moved(box: Box, rows: int) -> Box:
    """``box`` that many rows further down."""
    return ((box[0][0] + rows, box[0][1] + rows), *box[1:]) if rows else box


def _common_state(folder: Path, metadata: Metadata) -> Mapping[str, Any]:
    """Arguments and counters: ``common.pt``, or the object that newer versions keep instead."""
    path = folder / "common.pt"
    if path.exists() or path.is_symlink():
        value = open_torch_file(path).value
    else:
        stored = [n for n in metadata.objects if n.split("/", 1)[0] == "common_state"]
        value = read_object(metadata.objects[stored[0]], stored[0]) if stored else {}
    return value if isinstance(value, dict) else {}
