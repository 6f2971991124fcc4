"""A Megatron-core checkpoint under canonical names: layers unstacked, states sorted out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mds_ckpt.checkpoint import Checkpoint, LazyTensor, PiecedTensor, StoredPiece
from mds_ckpt.errors import RejectedError
from mds_ckpt.files.regular_file import RegularFile
from mds_ckpt.formats.torch_dist.metadata import Metadata, StoredTensor, read_metadata
from mds_ckpt.formats.torch_dist.model import describe
from mds_ckpt.formats.torch_dist.record import RecordSource, read_object
from mds_ckpt.manifest import ModelRecord
from mds_ckpt.megatron.assemble import model_order
from mds_ckpt.megatron.legacy_args import plain
from mds_ckpt.megatron.legacy_model import args_of
from mds_ckpt.megatron.naming import block_name, canonical_name
from mds_ckpt.pickles.archive import open_torch_file
from mds_ckpt.read_options import ReadOptions
from mds_ckpt.tensors.box import extents, size

__all__ = ["Sources", "read_torch_dist"]

MOST_LAYERS = 10_000
_STACKED = re.compile(r"(encoder|decoder)\.layers\.(?!\d+\.)(.+)")
_STATE = re.compile(r"optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param|param)\.(.+)")
_STATES = {
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "fp32_param": "master",
    "param": "master",
}
_VOCABULARY = frozenset({"embedding.word_embeddings.weight", "output_layer.weight"})


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
        foreign = [key for key, _ in sorted_out.get("weight", ()) if _canonical(key) is None]
        if foreign:
            self._is_foreign = True
            self._notes.append(
                f"the tensors keep their stored names, because '{foreign[0]}' is not Megatron's"
            )
            tensors = self._metadata.tensors.items()
            return {"weight": {name: self._whole(name, tensor) for name, tensor in tensors}}
        if dropped:
            self._notes.append(
                f"{len(dropped)} optimizer tensors such as '{dropped[0]}' are flat buckets of "
                f"their run's layout, and are left out"
            )
        return {state: self._by_name(tensors) for state, tensors in sorted_out.items()}

    def _by_name(self, tensors: Sequence[tuple[str, StoredTensor]]) -> dict[str, LazyTensor]:
        found: dict[str, LazyTensor] = {}
        for key, stored in tensors:
            for tensor in self._named(key, stored):
                if tensor.name in found:
                    raise self._refused("it is stored twice", tensor.name)
                found[tensor.name] = tensor
        return {name: found[name] for name in sorted(found, key=model_order)}

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

    def _named(self, name: str, stored: StoredTensor) -> list[LazyTensor]:
        canonical = _canonical(name)
        if canonical is None:
            raise self._refused("its optimizer state belongs to no parameter", name)
        if _STACKED.fullmatch(name) is None:
            return [self._whole(canonical, stored)]
        count = stored.shape[0] if stored.shape else 0
        if not 1 <= count <= MOST_LAYERS:
            raise self._refused(f"its first dimension is no number of layers: {count}", name)
        stack, _, rest = canonical.partition(".layers.0.")
        names = [f"{stack}.layers.{layer}.{rest}" for layer in range(count)]
        return self._layers(names, stored)

    def _whole(self, name: str, stored: StoredTensor) -> LazyTensor:
        shape, rows = stored.shape, self._words
        pieces = []
        is_cut = name in _VOCABULARY and rows is not None and bool(shape)
        if is_cut and rows is not None:
            if not 1 <= rows <= shape[0]:
                raise self._refused(f"it has {shape[0]} rows, and --vocab-size says {rows}", name)
            shape = (rows, *shape[1:])
        for chunk, source in zip(stored.chunks, self._sources.of(stored), strict=True):
            box = chunk.box
            if is_cut:
                box = ((box[0][0], min(box[0][1], shape[0])), *box[1:])
                if box[0][0] >= box[0][1]:
                    continue
            pieces.append(StoredPiece(box, None, source))
        return PiecedTensor(name, shape, stored.dtype, pieces=pieces)

    def _layers(self, names: Sequence[str], stored: StoredTensor) -> list[LazyTensor]:
        """One tensor for each layer out of one whose first dimension is the layer."""
        pieces: list[list[StoredPiece]] = [[] for _ in names]
        for chunk, source in zip(stored.chunks, self._sources.of(stored), strict=True):
            box = chunk.box[1:]
            for number, layer in enumerate(range(*chunk.box[0])):
                part = replace(source, offset=number * size(box))
                pieces[layer].append(StoredPiece(box, None, part))
        return [
            PiecedTensor(name, stored.shape[1:], stored.dtype, pieces=mine)
            for name, mine in zip(names, pieces, strict=True)
        ]

    def _model(self, weights: Mapping[str, LazyTensor]) -> ModelRecord:
        words = weights.get("embedding.word_embeddings.weight")
        is_gpt = words is not None and len(words.shape) == 2 and not self._is_foreign
        is_gpt = is_gpt and any(name.startswith("decoder.layers.0.") for name in weights)
        config: Mapping[str, Any] = {}
        if is_gpt:
            self._check_layers(weights)
            config, notes = describe(
                weights,
                args=self._args,
                said=self._options.model,
                path=self._folder,
                is_needed=self._is_needed,
            )
            self._notes.extend(notes)
        rows = words.shape[0] if words is not None and words.shape else 0
        if is_gpt and self._words is None:
            self._notes.append(
                f"the true vocabulary is not stored: all {rows} rows are kept; give --vocab-size "
                f"to leave padding rows out"
            )
        family = "gpt" if is_gpt else "unknown"
        if not self._is_foreign and any(name.startswith("encoder.layers.0.") for name in weights):
            family = "t5" if is_gpt else "bert"
        return ModelRecord(
            family=family,
            config=config,
            vocab_size=rows,
            tied_embeddings="output_layer.weight" not in weights,
        )

    def _check_layers(self, weights: Mapping[str, LazyTensor]) -> None:
        """Every layer holds the same parameters; RejectedError names the first that is missing."""
        layers: dict[int, set[str]] = {}
        for name in weights:
            if name.startswith("decoder.layers."):
                number, rest = name.split(".", 3)[2:]
                layers.setdefault(int(number), set()).add(rest)
        everything = set().union(*layers.values())
        count = max(layers) + 1
        if len(layers) < count:
            gap = next(number for number in range(count) if number not in layers)
            raise self._refused("the layer is missing", f"decoder.layers.{gap}")
        for layer, names in layers.items():
            if names != everything and not any("experts" in rest for rest in everything):
                missing = min(everything - names)
                raise self._refused("it is missing", f"decoder.layers.{layer}.{missing}")

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


def _canonical(name: str) -> str | None:
    """The canonical name of a stored one, that of layer 0 for a stacked one; None if unknown."""
    if (stacked := _STACKED.fullmatch(name)) is not None:
        inner = block_name(stacked[2])
        return None if inner is None else f"{stacked[1]}.layers.0.{inner.name}"
    stack = "encoder" if name.startswith("encoder.") else "decoder"
    named = canonical_name(name, stack=stack)
    return None if named is None else named.name


def _common_state(folder: Path, metadata: Metadata) -> Mapping[str, Any]:
    """Arguments and counters: ``common.pt``, or the object that newer versions keep instead."""
    path = folder / "common.pt"
    if path.exists() or path.is_symlink():
        value = open_torch_file(path).value
    else:
        stored = [n for n in metadata.objects if n.split("/", 1)[0] == "common_state"]
        value = read_object(metadata.objects[stored[0]], stored[0]) if stored else {}
    return value if isinstance(value, dict) else {}
