"""Nanotron's checkpoints of Llama, read: one safetensors file a tensor and rank.

``model_config.json`` says the model; each file of a shared tensor says, in its header, which slices
of the whole tensor its own slices are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mds_ckpt import companions
from mds_ckpt.checkpoint import Checkpoint, PiecedTensor, StoredPiece
from mds_ckpt.errors import RejectedError, UnsupportedError
from mds_ckpt.formats import Format, refuse_read_options
from mds_ckpt.read_options import ReadOptions

if TYPE_CHECKING:
    from mds_ckpt.families.rule import Rule
    from mds_ckpt.files.safetensors_file import SafetensorsFile
    from mds_ckpt.manifest import ModelRecord
    from mds_ckpt.stored import Stored
    from mds_ckpt.tensors.box import Box

CONFIG, META, LATEST = "model_config.json", "checkpoint_metadata.json", "latest.txt"
MOST_FILES = 1_000_000
_FILE = re.compile(r"model_(\w+?)(?:_pp-rank-(\d+)-of-(\d+)_tp-rank-(\d+)-of-(\d+))?\.safetensors")
_AGAIN = "copy the folder again"


def find(path: Path) -> Path | None:
    """The folder with ``model`` and its configuration, at ``path`` or where ``latest.txt`` says."""
    from mds_ckpt.files.regular_file import read_whole

    if _is_step(path):
        return path
    if not (path / LATEST).is_file():
        return None
    word = read_whole(path / LATEST, limit=4096).decode("utf-8", "replace").strip()
    folder = path / word
    is_named = word.isascii() and word.isdecimal() and not folder.is_symlink()
    return folder if is_named and _is_step(folder) else None


def _is_step(folder: Path) -> bool:
    model = folder / "model"
    return (folder / CONFIG).is_file() and model.is_dir() and not model.is_symlink()


def detect(path: Path) -> bool:
    """Whether it is such a folder, or one of several steps."""
    try:
        return path.is_dir() and find(path) is not None
    except RejectedError:
        return False


def open_nanotron(path: Path, options: ReadOptions | None = None) -> Checkpoint:
    """Open a nanotron checkpoint; slices are put together when they are read."""
    refuse_read_options(options, "nanotron")
    from mds_ckpt.stored import canonical_tensors

    folder = find(path)
    if folder is None:
        raise RejectedError(path, f"it has no {CONFIG} beside a folder 'model'", remedy=_AGAIN)
    config = companions.read_json(folder / CONFIG)
    try:
        model = _model(config)
    except ValueError as error:
        raise UnsupportedError(
            folder / CONFIG, str(error), remedy="this model can't be carried over unchanged"
        ) from None
    stored, parallel = _stored(folder)
    is_paired = bool(config.get("rope_interleaved", True))
    rules = list(_rules(model, is_paired=is_paired))
    tensors, unused = canonical_tensors(folder, rules, stored, config_name=CONFIG)
    for name, part in unused.items():
        raise RejectedError(part.path, "no Llama has it", remedy=_AGAIN, tensor=name)
    counters = _counters(folder)
    pairs = "side by side" if is_paired else "in halves"
    return Checkpoint(
        path=folder,
        format="nanotron",
        model=model,
        states={"weight": tensors},
        step=counters.get("iteration"),
        counters=counters,
        parallel=parallel,
        companions=companions.find(folder),
        notes=(
            f"rotating pairs lie {pairs}, as rope_interleaved says",
            "optimizer state, which nanotron cuts by ranks, is not read",
        ),
    )


def _model(config: Mapping[str, Any]) -> ModelRecord:
    from mds_ckpt.families.llama import llama_from_hf

    for key in ("moe_config", "num_experts", "_use_qkv_packed", "sliding_window_size"):
        if config.get(key):
            raise ValueError(f"'{key}' is set, which this reader does not know")
    if config.get("attention_bias"):
        raise ValueError("'attention_bias' is set, which this reader does not know")
    known = {key: value for key, value in config.items() if key != "attention_bias"}
    return llama_from_hf("llama", known)


def _counters(folder: Path) -> dict[str, int]:
    if not (folder / META).is_file():
        return {}
    metas = companions.read_json(folder / META).get("metas")
    metas = metas if isinstance(metas, dict) else {}
    found = {
        "iteration": metas.get("last_train_step"),
        "consumed_samples": metas.get("consumed_train_samples"),
        "consumed_tokens": metas.get("consumed_tokens_total"),
    }
    return {name: value for name, value in found.items() if type(value) is int and value >= 0}


# Files -------------------------------------------------------------------------------------------


def _stored(folder: Path) -> tuple[dict[str, Stored], dict[str, int]]:
    """The whole tensors by name, and the degrees that file names tell."""
    files: dict[str, list[Path]] = {}
    parallel: dict[str, int] = {}
    for path, match in _files(folder / "model"):
        inside = path.parent.relative_to(folder / "model").parts
        files.setdefault(".".join((*inside, match[1])), []).append(path)
        if match[5] is not None:
            parallel = {"pp": int(match[3]), "tp": int(match[5])}
            if not (int(match[2]) < int(match[3]) and int(match[4]) < int(match[5])):
                raise RejectedError(path, "its name counts past its own degree", remedy=_AGAIN)
    if not files:
        raise RejectedError(folder / "model", "it holds no tensors", remedy=_AGAIN)
    return {name: _tensor(name, sorted(paths)) for name, paths in files.items()}, parallel


def _files(root: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    count = 0
    for place, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            count += 1
            if count > MOST_FILES:
                raise RejectedError(root, f"it has more than {MOST_FILES} files", remedy=_AGAIN)
            match = _FILE.fullmatch(name)
            if match is not None:
                yield Path(place) / name, match


def _tensor(name: str, paths: list[Path]) -> Stored:
    from mds_ckpt.files.safetensors_file import SafetensorsFile
    from mds_ckpt.stored import Stored
    from mds_ckpt.tensors.box import coverage_fault

    pieces: list[StoredPiece] = []
    shape: tuple[int, ...] = ()
    dtype = ""
    for path in paths:
        file = SafetensorsFile(path)
        entry = file.entry("data")
        shape, dtype = _whole_shape(file) or entry.shape, entry.dtype
        pieces += _pieces(file, shape)
    fault = coverage_fault(shape, [(piece.box, piece.flat) for piece in pieces])
    if fault is not None:
        raise RejectedError(
            paths[0].parent,
            f"its {len(paths)} files do not hold it exactly once: {fault}",
            remedy="copy the files that are missing",
            tensor=name,
        )
    tensor = PiecedTensor(name, shape, dtype, pieces=pieces)
    return Stored(paths[0], dtype, shape, _Flat(tensor))


class _Flat:
    """The elements of a tensor in row-major order."""

    def __init__(self, tensor: PiecedTensor) -> None:
        self._tensor = tensor

    def read(self, start: int, stop: int) -> Any:
        return self._tensor.read(None, (start, stop))


_SHAPE = re.compile(r"\(((?:\d{1,12}, ?)*\d{1,12}|\d{1,12},)\)")
_NUMBER = re.compile(r"None|\d{1,12}")


def _whole_shape(file: SafetensorsFile) -> tuple[int, ...] | None:
    text = file.header.metadata.get("unsharded_shape")
    if text is None:
        return None
    if _SHAPE.fullmatch(text) is None:
        raise RejectedError(file.path, "its unsharded_shape is not one", remedy=_AGAIN)
    return tuple(int(word) for word in text.strip("()").split(",") if word.strip())


def _pieces(file: SafetensorsFile, shape: tuple[int, ...]) -> Iterator[StoredPiece]:
    """Where this file's slices belong in the whole tensor."""
    from mds_ckpt.files.safetensors_file import StoredTensor
    from mds_ckpt.tensors.box import extents, whole

    entry = file.entry("data")
    source = StoredTensor(file, "data", dtype=entry.dtype, shape=entry.shape)
    text = file.header.metadata.get("local_global_slices_pairs")
    if text is None:
        yield StoredPiece(whole(shape), None, source)
        return
    for pair in text.split(";"):
        local_text, _, global_text = pair.partition("#")
        local = _box(file, local_text, entry.shape)
        box = _box(file, global_text, shape)
        if extents(local) != extents(box):
            raise RejectedError(file.path, "its slices differ in size", remedy=_AGAIN)
        inner = PiecedTensor(
            "data",
            entry.shape,
            entry.dtype,
            pieces=[StoredPiece(whole(entry.shape), None, source)],
        )
        yield StoredPiece(box, None, _Part(inner, local))


class _Part:
    """The elements of a box of a stored tensor, in row-major order."""

    def __init__(self, tensor: PiecedTensor, box: Box) -> None:
        self._tensor = tensor
        self._box = box

    def read(self, start: int, stop: int) -> Any:
        return self._tensor.read(self._box, (start, stop))


def _box(file: SafetensorsFile, text: str, shape: tuple[int, ...]) -> Box:
    """A box from ``"0,10,None|None,None,None"``; RejectedError unless it lies inside ``shape``."""
    ranges = []
    for part, extent in zip(text.split("|"), shape, strict=False):
        words = part.split(",")
        if len(words) != 3 or not all(_NUMBER.fullmatch(word) for word in words):
            raise RejectedError(file.path, "its slices are not numbers", remedy=_AGAIN)
        start, stop, step = (None if word == "None" else int(word) for word in words)
        first, last = start or 0, extent if stop is None else stop
        if step not in (None, 1) or not 0 <= first < last <= extent:
            raise RejectedError(file.path, "its slices lie outside the tensor", remedy=_AGAIN)
        ranges.append((first, last))
    if len(ranges) != len(shape) or text.count("|") != len(shape) - 1:
        raise RejectedError(file.path, "its slices have another dimension", remedy=_AGAIN)
    return tuple(ranges)


# Names -------------------------------------------------------------------------------------------


def _rules(model: ModelRecord, *, is_paired: bool) -> Iterator[Rule]:
    from mds_ckpt.families.change import Fused, Grouped, Paired
    from mds_ckpt.families.rule import Rule, Shape, Target, same

    shape = Shape.of(model)
    h, f = shape.hidden, shape.width
    grouped = Grouped(shape.groups, shape.heads // shape.groups, shape.channels)
    words = "model.token_position_embeddings.pp_block.token_embedding.weight"
    yield same("embedding.word_embeddings.weight", words, shape.vocab, h)
    for layer in range(shape.layers):
        ours, theirs = f"decoder.layers.{layer}", f"model.decoder.{layer}.pp_block"
        yield Rule(
            Target(f"{ours}.self_attention.linear_qkv.weight", (shape.qkv_rows, h)),
            (Target(f"{theirs}.attn.qkv_proj.weight", (shape.qkv_rows, h)),),
            Fused(Paired(grouped) if is_paired else grouped),
        )
        sizes = {
            "input_layernorm": ("input_layernorm", (h,)),
            "self_attention.linear_proj": ("attn.o_proj", (h, shape.heads * shape.channels)),
            "pre_mlp_layernorm": ("post_attention_layernorm", (h,)),
            "mlp.linear_fc1": ("mlp.gate_up_proj", (2 * f, h)),
            "mlp.linear_fc2": ("mlp.down_proj", (h, f)),
        }
        for name, (stored, size) in sizes.items():
            yield same(f"{ours}.{name}.weight", f"{theirs}.{stored}.weight", *size)
    yield same("decoder.final_layernorm.weight", "model.final_layer_norm.pp_block.weight", h)
    if not model.tied_embeddings:
        yield same("output_layer.weight", "model.lm_head.pp_block.weight", shape.vocab, h)


FORMAT = Format(name="nanotron", title="nanotron checkpoint", detect=detect, open=open_nanotron)
